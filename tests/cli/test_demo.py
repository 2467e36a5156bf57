"""The demo's own judgement: what it reads from a stream, what it prints of it, and when it says identical."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvxfer.cli import demo
from kvxfer.errors import ConfigError, KvxferError, ProtocolError, TransportError

REPORT = {
    "prefill": "remote",
    "blocks_moved": 4,
    "bytes_moved": 2_000_000,
    "bytes_before_prefill_end": 1_500_000,
    "lane": "mapped",
    "lane_reason": "mapped: same host, shared pool",
    "seconds": {"wire": 0.001},
    "prefill_s": 1.5,
}


def event(**content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def token(number: int, text: str) -> bytes:
    return event(choices=[{"delta": {"content": text}, "token_ids": [number]}])


USAGE = event(choices=[], usage={"prompt_tokens": 64, "completion_tokens": 2}, kvxfer=REPORT)
DONE = b"data: [DONE]\n\n"
GOOD = token(7, "Hi ") + token(9, "there") + USAGE + DONE


@contextlib.asynccontextmanager
async def server(body: bytes, status: str = "200 OK") -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        asked = json.loads(await reader.readexactly(length))
        assert (asked["stream"], asked["temperature"], asked["return_token_ids"]) == (True, 0, True)
        writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


async def asked(body: bytes, status: str = "200 OK") -> demo.Answer:
    async with server(body, status) as url:
        return await demo.ask(url, "tiny", "hello", 2, is_shown=True)


async def test_a_stream_is_read_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    answer = await asked(GOOD)
    assert (answer.token_ids, answer.text) == ([7, 9], "Hi there")
    assert answer.report == REPORT
    assert capsys.readouterr().out == "Hi there"
    assert 0 < answer.ttft_s <= answer.total_s


@pytest.mark.parametrize(
    ("body", "status", "error", "words"),
    [
        (token(7, "Hi"), "200 OK", ProtocolError, "without .DONE."),
        (token(7, "Hi") + USAGE + DONE, "200 OK", ProtocolError, "1 token ids came for 2"),
        (event(error={"message": "peer gone"}), "200 OK", KvxferError, "peer gone"),
        (b'{"error": {"message": "no worker"}}', "503 Service Unavailable", KvxferError, "answered 503.*no worker"),
        (b"data: {not json\n\n", "200 OK", ProtocolError, "not JSON"),
    ],
)
async def test_a_bad_stream_is_an_error(body: bytes, status: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        await asked(body, status)


async def test_demo_without_a_service_reports_it() -> None:
    with pytest.raises(TransportError, match=r"127\.0\.0\.1:1 failed"):
        await demo.ask("http://127.0.0.1:1", "tiny", "hello", 2, is_shown=False)


def test_summary() -> None:
    answer = demo.Answer([7, 9, 11], "Hi", {"prompt_tokens": 64}, REPORT, ttft_s=0.5, total_s=1.0)
    rows = [" ".join(line.split()) for line in demo.summary(answer).splitlines()]
    assert rows == [
        "prompt 64 tokens",
        "prefill 1.50 s in the prefill worker",
        "moved 4 blocks, 2.0 MB",
        "of these early 1.5 MB (75%) before prefill ended",
        "lane mapped: same host, shared pool",
        "speed 2.00 GB/s while bytes were moving (1.0 ms)",
        "first token 500.0 ms after the request was sent",
        "answer 3 tokens, 4.0 tokens/s",
    ]


def test_summary_of_a_local_prefill() -> None:
    answer = demo.Answer(report={"prefill": "local", "reason": "no prefill worker", "failure": "peer_gone"})
    text = demo.summary(answer)
    assert "no prefill worker" in text
    assert "peer_gone" in text


def test_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    ours = demo.Answer([7, 9], "Hi there", report=REPORT)
    assert demo.verdict(ours, demo.Answer([7, 9], "Hi there")) == 0
    assert "The 2 tokens are identical." in capsys.readouterr().out
    assert demo.verdict(ours, demo.Answer([7, 8], "Hi you")) == 1
    assert "differ from token 1 on" in capsys.readouterr().out
    assert demo.verdict(ours, demo.Answer([7], "Hi ")) == 1
    assert demo.verdict(demo.Answer([7, 9], "Hi there"), demo.Answer([7, 9], "Hi there")) == 1
    assert demo.verdict(demo.Answer(report=REPORT), demo.Answer()) == 1


@pytest.mark.parametrize(
    "values", [{"decode": 0}, {"prefill": -1}, {"port": 65536}, {"max_tokens": 0}, {"threads": -1}, {"timeout_s": 0}]
)
def test_options_are_checked(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        demo.DemoOptions(**values)
