"""Hostile clients and engines, and careless operators: what they can not do to a router."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from kvxfer.openai.errors import RequestError
from kvxfer.policy.keylimits import KeyLimits
from kvxfer.router.apis import api_of
from kvxfer.router.auth import ApiKeys
from kvxfer.router.inbound import Inbound
from kvxfer.router.keyfile import KeyEntry, digest_of, read_key_file
from kvxfer.types import Role
from tests.support.fake_workers import FakeWorker, router_over


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_of_keys_that_others_may_read_is_told(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-this-is-a-secret")
    path.chmod(mode)
    assert len(read_key_file(str(path))) == 1
    assert ("may be read by others" in caplog.text) is warns


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("adapter", "may"),
    [("mine", True), (None, True), ("theirs", False), ("", False), (["mine"], False), (["mine", "theirs"], False)],
)
def test_an_adapter_is_no_way_around_the_models_of_a_key(path: str, adapter: Any, may: bool) -> None:
    keys = ApiKeys()
    keys.replace([KeyEntry("team", (digest_of(b"sk-1"),), KeyLimits(), frozenset({"base", "mine"}))])
    api = api_of(path)
    assert api is not None
    body = {"model": "base", "text": "x", "messages": [{"role": "user", "content": "x"}], "lora_path": adapter}
    inbound = Inbound.read(api, json.dumps(body).encode())
    keyed = keys.enter("Bearer sk-1")
    if may:
        assert keyed.admit(inbound, ("base",)) is inbound
    else:
        with pytest.raises(RequestError, match="no adapter but those") as caught:
            keyed.admit(inbound, ("base",))
        assert (caught.value.status, caught.value.param) == (403, "lora_path")
    keyed.end()


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_for_too_long_an_answer_costs_no_worker_its_place(stream: bool, has_begun: bool) -> None:
    """A client asks for it, with logprobs of a long prompt; no other worker would answer with less."""
    d, other = (FakeWorker(name, Role.BOTH, dialect="plain") for name in ("d0", "d1"))
    d.tokens = other.tokens = [*(["a"] if has_begun else []), "x" * (2 << 20)]
    async with router_over(d, other, max_answer_bytes=1 << 20) as router:
        for number in range(1, 6):
            answer = await router.complete(stream=stream)
            assert answer.status_code == (200 if stream and has_begun else 502)
            assert "longer than" in answer.text
            assert len(d.received) + len(other.received) == number
        assert {worker["state"] for worker in router.workers.describe()} == {"in"}
        assert await router.metric('kvxfer_router_leg_failures_total{kind="too_long",part="decode"}') == 5


class SaysBytes(FakeWorker):
    async def _json(self, send: Any, status: int, body: Any) -> None:
        kind = (b"content-type", b"application/octet-stream")
        await send({"type": "http.response.start", "status": 200, "headers": [kind, (b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"\x00\x01\x02\x03"})


async def test_a_request_for_bytes_costs_no_worker_its_place() -> None:
    """vLLM answers embeddings with bytes where the request says so."""
    d = SaysBytes("d0", Role.BOTH, dialect="plain")
    async with router_over(d) as router:
        for number in range(1, 5):
            body = {"model": "tiny", "input": "x", "encoding_format": "bytes"}
            assert (await router.client.post("/v1/embeddings", json=body)).status_code == 502
            assert len(d.received) == number
        assert router.workers.describe()[0]["state"] == "in"


async def test_a_key_for_some_models_is_told_of_no_other() -> None:
    keys = ApiKeys()
    keys.replace([KeyEntry("team", (digest_of(b"sk-1"),), KeyLimits(), frozenset({"mine"}))])
    async with router_over(FakeWorker("d0", Role.BOTH, model="hidden-one"), keys=keys) as router:
        for model in ("mine", "hidden-one", "x"):
            answer = await router.complete(model=model, headers={"authorization": "Bearer sk-1"})
            expected = (404, "model_not_found") if model == "mine" else (403, "model_not_allowed")
            assert (answer.status_code, answer.json()["error"]["code"]) == expected
            assert model == "hidden-one" or "hidden-one" not in answer.text
        for path in ("/v1/models", "/v1/models/mine", "/v1/models/hidden", "/ready", "/ready?model=mine"):
            answer = await router.client.get(path, headers={"authorization": "Bearer sk-1"})
            assert "hidden-one" not in answer.text
