"""The router's parts on their own: the view of the workers, keys, headers, options, failures, the server's start."""

from __future__ import annotations

import asyncio
import json
import pathlib
import socket

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError
from kvxfer.openai.errors import RequestError
from kvxfer.router import failure, headers
from kvxfer.router.auth import ApiKeys
from kvxfer.router.failure import FailureKind
from kvxfer.router.options import RouterOptions
from kvxfer.router.server import serve
from kvxfer.rpc import load_or_create_token
from tests.support.fake_workers import eventually, free_port


def test_keys_come_from_a_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nkey-number-one\n\n  key-number-two \n")
    keys = ApiKeys.from_file(str(path))
    keys.check("Bearer key-number-two")
    keys.check("bearer key-number-one")
    for wrong in (None, "", "Bearer", "Bearer # ours", "Bearer key", "Basic key-number-one", "Bearer \u00e4"):
        with pytest.raises(RequestError) as caught:
            keys.check(wrong)
        assert caught.value.status == 401
    assert "key-number" not in repr(keys)
    for content in ("", "# none\n", "x" * 2000):
        path.write_text(content)
        with pytest.raises(ConfigError):
            ApiKeys.from_file(str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        ApiKeys.from_file(str(tmp_path / "missing"))


def test_headers_are_kept_only_where_they_make_sense() -> None:
    assert headers.request_id("abc-1") == "abc-1"
    for wrong in (None, "", "a b", "x" * 129, "a\n", "\u00e4"):
        assert headers.request_id(wrong).startswith("req-")
    trace = f"00-{'1' * 32}-{'2' * 16}-00"
    kept = headers.leg_headers({"traceparent": trace}, request_id="r", forwards_authorization=True)
    assert kept["traceparent"] == trace
    for wrong in ("", "nonsense", f"00-{'0' * 32}-{'2' * 16}-00"):
        made = headers.leg_headers(
            {"traceparent": wrong, "tracestate": "a=b", "authorization": "Bearer x"},
            request_id="r",
            forwards_authorization=False,
        )
        assert made["traceparent"] != wrong
        assert "tracestate" not in made
        assert "authorization" not in made


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"local_prefill": "maybe"},
        {"on_prefill_failure": "panic"},
        {"min_remote_prefill_tokens": -2},
        {"max_inflight": 0},
        {"attempts_max": 0},
        {"request_timeout_s": 0},
        {"connect_timeout_s": 31.0},
        {"max_body_bytes": 0},
        {"eject_base_s": 20.0},
        {"host": "0.0.0.0"},
        {"host": "example.org"},
    ],
)
def test_options_are_checked_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RouterOptions(**wrong)  # type: ignore[arg-type]
    assert RouterOptions(host="0.0.0.0", insecure=True).allows_local_prefill


def test_what_a_workers_answer_means() -> None:
    def body(code: str, retryable: bool) -> bytes:
        return json.dumps({"error": {"message": "m", "code": code, "retryable": retryable}}).encode()

    cases = {
        (400, body("invalid_argument", False)): (FailureKind.REFUSED, 400, "invalid_argument", False),
        (400, body("context_length_exceeded", False)): (
            FailureKind.DOES_NOT_FIT,
            400,
            "context_length_exceeded",
            False,
        ),
        (413, body("invalid_argument", False)): (FailureKind.DOES_NOT_FIT, 413, "invalid_argument", False),
        (404, b""): (FailureKind.REFUSED, 404, "refused", False),
        (409, body("blocks_busy", True)): (FailureKind.ERROR, 409, "blocks_busy", True),
        (429, b"slow down"): (FailureKind.OVERLOADED, 503, "overloaded", True),
        (503, body("overloaded", True)): (FailureKind.OVERLOADED, 503, "overloaded", True),
        (503, body("closed", False)): (FailureKind.ERROR, 503, "closed", False),
        (500, b"<html>"): (FailureKind.ERROR, 500, "internal", False),
        (302, b""): (FailureKind.ERROR, 502, "internal", False),
    }
    for (status, content), (kind, told, code, retryable) in cases.items():
        found = failure.from_answer("decode", status, content)
        assert (found.kind, found.status, found.code, found.is_retryable) == (kind, told, code, retryable)


@given(st.integers(100, 599), st.binary(max_size=40) | st.just(b'{"error": {"message": "m", "code": []}}'))
def test_any_answer_of_a_worker_means_something(status: int, content: bytes) -> None:
    found = failure.from_answer("prefill", status, content)
    assert set(found.body["error"]) >= {"message", "type", "param", "code", "retryable"}
    assert 400 <= found.status < 600


def made_token(directory: pathlib.Path) -> str:
    path = directory / "token"
    load_or_create_token(path)
    return str(path)


async def test_a_router_without_a_coordinator_starts_and_says_so(tmp_path: pathlib.Path) -> None:
    stop = asyncio.Event()
    lines: list[dict[str, object]] = []
    options = RouterOptions(coordinator=f"127.0.0.1:{free_port()}", token_file=made_token(tmp_path))
    task = asyncio.create_task(serve(options, on_ready=lines.append, stop=stop))
    await eventually(lambda: bool(lines) or task.done())
    line = lines[0]
    assert line["event"] == "ready"
    assert line["role"] == "router"
    async with httpx.AsyncClient(base_url=str(line["http_url"]), trust_env=False) as client:
        health = (await client.get("/health")).json()
        assert health["coordinator_connected"] is False
        assert (await client.get("/ready")).status_code == 503
        answer = await client.post("/v1/completions", json={"model": "m", "prompt": "x"})
        assert answer.status_code == 503
    stop.set()
    await asyncio.wait_for(task, 10.0)
    host, _, port = str(line["address"]).rpartition(":")
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind((host, int(port)))


async def test_a_taken_port_is_one_sentence(tmp_path: pathlib.Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        options = RouterOptions(coordinator="127.0.0.1:1", port=port, token_file=made_token(tmp_path))
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            await serve(options, on_ready=lambda line: None, stop=asyncio.Event())
