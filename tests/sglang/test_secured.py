"""SGLang's servers as a cluster runs them that trusts no network: engines find each other by a coordinator with
certificates, pages move on encrypted streams, and clients reach the router over TLS (`make test-sglang-router`). What
clients get is what one server says.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvxfer.trust.identity import CertRole
from tests.support.certificates import Authority
from tests.support.routers import RouterProcess
from tests.support.sglang.stock import PYTHON, StockSglang
from tests.support.sglang_core.coordinator import coordinator
from tests.support.stock_engines import ask, eventually, metric, serving
from tests.support.trust import ClusterAuthority
from tests.support.vllm.checks import prompt

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="build/sglang-venv is not there: make test-sglang-router"),
]

LENGTHS = [1, 40, 300, 1500]
"""Pages are of 16 tokens, chunks of 256."""


def body(length: int) -> dict[str, Any]:
    ids = [token % 500 for token in prompt(length, seed="secured")]
    return {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    from kvxfer.engine.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", layers=3, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory, model: pathlib.Path) -> list[list[int]]:
    """What one server says, which has ended by then."""
    server = StockSglang("one", tmp_path_factory.mktemp("one"), model)
    with serving(server):
        return [ask(server.url, "/generate", **body(length)).json()["output_ids"] for length in LENGTHS]


@contextlib.contextmanager
def router_with_tls(authority: Authority, *flags: str) -> Iterator[tuple[RouterProcess, httpx.Client]]:
    identity = authority.issue("router")
    router = RouterProcess(*flags, f"--tls-cert-file={identity.cert}", f"--tls-key-file={identity.key}")
    try:
        with httpx.Client(
            verify=authority.client_context(), trust_env=False, timeout=120, base_url=router.url
        ) as client:
            eventually(lambda: client.get("/ready").status_code == 200, "the router is ready")
            yield router, client
    finally:
        if router.process.poll() is None:
            router.stop()


def test_certificates_encrypted_streams_and_tls(
    tmp_path: pathlib.Path, model: pathlib.Path, wanted: list[list[int]]
) -> None:
    ca, authority = ClusterAuthority(tmp_path / "ca"), Authority(tmp_path)
    token_file = tmp_path / "token"
    token_file.write_text("s" * 40)
    token_file.chmod(0o600)
    with coordinator(token_file, **ca.coordinator_options()) as address, contextlib.ExitStack() as stack:
        engines = {}
        for role in ("prefill", "decode"):
            issued = ca.issue(CertRole(role), f"{role}-0")
            settings = {
                "KVXFER_ENCRYPT": "always",
                "KVXFER_SGLANG_LANES": "stream",
                "KVXFER_SGLANG_TOKEN_FILE": str(token_file),
                "KVXFER_SGLANG_COORDINATOR": address,
                "KVXFER_SGLANG_COORDINATOR_CA_FILE": ca.ca_file,
                "KVXFER_SGLANG_COORDINATOR_CERT_FILE": str(issued.cert_file),
                "KVXFER_SGLANG_COORDINATOR_KEY_FILE": str(issued.key_file),
            }
            engines[role] = StockSglang(role, tmp_path, model, role, settings)
        prefill, decode = engines["prefill"], engines["decode"]
        stack.enter_context(serving(prefill, decode))
        flags = (f"--prefill={prefill.as_prefill}", f"--decode={decode.url}", "--dialect=sglang")
        router, client = stack.enter_context(router_with_tls(authority, *flags))
        assert router.url.startswith("https://")
        answers = [client.post("/generate", json=body(length)) for length in LENGTHS]
        assert [answer.status_code for answer in answers] == [200] * len(LENGTHS)
        assert [answer.json()["output_ids"] for answer in answers] == wanted
        loads = [metric(decode.url, "sglang:kvxfer_loads_total", label) for label in ("", 'lane="stream"')]
        assert loads == [len(LENGTHS)] * 2
        assert metric(decode.url, "sglang:kvxfer_bytes_total") > 0
