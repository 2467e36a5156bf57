"""`kvxfer load run` against SGLang's server, unchanged (`make test-sglang-router`): a prefill and a decode server with
kvxfer's transfer backend behind kvxfer's router, and one alone. It runs in kvxfer's own environment; the servers have
SGLang's.
"""

from __future__ import annotations

import pathlib

import pytest

from tests.support.load_real import check_answers, check_joined, check_not_joined, load_on
from tests.support.sglang.stock import PYTHON, StockSglang
from tests.support.stock_engines import routing, serving

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="build/sglang-venv is not there: make test-sglang-router"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    from kvxfer.engine.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", layers=3, max_position_embeddings=2048)


def test_requests_to_a_pair_are_joined(
    tmp_path: pathlib.Path, tiny: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill, decode = (StockSglang(role, tmp_path, tiny, role) for role in ("prefill", "decode"))
    where = (f"--prefill={prefill.as_prefill}", f"--decode={decode.url}", "--dialect=sglang")
    with serving(prefill, decode), routing(*where) as router:
        load = load_on(router.url, tmp_path / "out")
    with capsys.disabled():
        print(f"\nSGLang, kvxfer's backend: {load.figures()}")
    check_answers(load)
    check_joined(load, prefill=f"127.0.0.1-{prefill.port}", decode=f"127.0.0.1-{decode.port}")
    assert not any(phases.is_queue_told or phases.is_transfer_told for phases in load.phases)


def test_of_one_server_alone_no_phase_is_known_and_that_is_said(
    tmp_path: pathlib.Path, tiny: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = StockSglang("alone", tmp_path, tiny)
    with serving(server):
        load = load_on(server.url, tmp_path / "out")
    with capsys.disabled():
        print(f"\nSGLang's server alone: {load.figures()}")
    check_answers(load)
    check_not_joined(load)
