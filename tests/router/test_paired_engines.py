"""SGLang's decode servers compute no prompt themselves, whatever they are asked: the router never asks them to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvxfer.router.dialects import DIALECTS, dialect
from kvxfer.router.fleet.worker import PAIRED_DIALECTS
from tests.support.one_process import MODEL, OneProcess, PlainAnswer, one_process, request

ALONE = [
    ("/v1/completions", {"prompt": "hi", "n": 2}, "n"),
    ("/generate", {"text": "hi", "session_params": {}}, "session_params"),
]


def sglang(*roles: str, **options: Any) -> Any:
    return one_process(*roles, kind="sglang", dialect="sglang", **options)


def ask(there: OneProcess, path: str = "/v1/completions", **more: Any) -> PlainAnswer:
    body = {"model": MODEL, **more} if path == "/generate" else {"model": MODEL, "max_tokens": 4, **more}
    return there.send(request("POST", path.encode(), json.dumps(body).encode(), b"content-type: application/json"))


def test_the_fleet_knows_the_dialects_that_compute_nothing_alone() -> None:
    assert {name for name in DIALECTS if not dialect(name).computes_alone} == {one.value for one in PAIRED_DIALECTS}


@pytest.mark.parametrize(("path", "body", "field"), ALONE)
def test_what_a_pair_cannot_share_is_refused_by_the_name_of_its_field(
    path: str, body: dict[str, Any], field: str
) -> None:
    with sglang("prefill", "decode") as there:
        answer = ask(there, path, **body)
        assert answer.status == 400, answer.body
        error = json.loads(answer.body)["error"]
        assert error["param"] == field
        assert "no worker here computes" in error["message"]
        assert ask(there, prompt="hi").headers["x-kvxfer-prefill"] == "remote"


@pytest.mark.parametrize(("path", "body", "field"), ALONE)
def test_an_engine_that_is_no_half_of_a_pair_answers_it(path: str, body: dict[str, Any], field: str) -> None:
    with sglang("prefill", "decode", "both") as there:
        for _ in range(4):
            answer = ask(there, path, **body)
            assert answer.status == 200, answer.body
            assert answer.headers["x-kvxfer-prefill"] == "local"


def test_without_a_prefill_server_there_is_no_worker() -> None:
    with sglang("prefill", "decode") as there:
        there.send(request("POST", f"/workers/127.0.0.1-{there.engines[0].port}/drain".encode()))
        assert there.send(request("GET", b"/ready")).status == 503
        answer = ask(there, prompt="hi")
        assert answer.status == 503, answer.body
        assert answer.headers["retry-after"]
        tokenized = ask(there, "/tokenize", prompt="hi")
        assert tokenized.status == 200, tokenized.body


@pytest.mark.parametrize("status", [500, 503])
def test_a_prefill_server_that_fails_is_never_the_clients_fault(status: int) -> None:
    with sglang("prefill", "decode") as there:
        there.engines[0].fault("status", status=status)
        assert all(ask(there, prompt="hi").status in (500, 503) for _ in range(4))
        there.engines[0].request("DELETE", "/mock/faults")
