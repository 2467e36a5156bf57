"""The clients of benchmarks/soak.py, at two routers that answer as each test says; and its relay of packets."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import pathlib
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.checkout

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
RIGHT = (5, 6, 7)
EVENTS = {"content-type": "text/event-stream"}


@pytest.fixture(scope="module")
def parts() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield {name: importlib.import_module(f"soaking.{name}") for name in ("load", "records", "relay")}
    for name in [name for name in sys.modules if name.split(".")[0] == "soaking"]:
        del sys.modules[name]


def event(*tokens: int) -> bytes:
    return b"data: " + json.dumps({"choices": [{"token_ids": list(tokens)}]}).encode() + b"\n\n"


def failed(code: str) -> bytes:
    return b"data: " + json.dumps({"error": {"code": code, "message": "x"}}).encode() + b"\n\n"


def account(**names: str) -> bytes:
    return b": kvxfer-account " + json.dumps(names).encode() + b"\n\n"


WHOLE = [event(5), event(6, 7), b"data: [DONE]\n\n"]


def answer(*chunks: bytes, status: int = 200, is_cut: bool = False, kind: str = EVENTS["content-type"]) -> bytes:
    head = f"HTTP/1.1 {status} x\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head.encode() + body + (b"" if is_cut else b"0\r\n\r\n")


class Routers:
    """``says[name]``: what each router answers to each request, in turn, and the last one for ever after."""

    def __init__(self, says: dict[str, list[bytes]]) -> None:
        self.says, self.urls, self.asked = says, dict[str, str](), list[str]()
        self._servers: list[asyncio.Server] = []

    async def __aenter__(self) -> Routers:
        for name in self.says:
            server = await asyncio.start_server(lambda r, w, name=name: self._serve(name, r, w), "127.0.0.1", 0)
            self._servers.append(server)
            self.urls[name] = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()

    async def _serve(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-le")
        )
        await reader.readexactly(length)
        self.asked.append(name)
        said = self.says[name]
        writer.write(said[0] if len(said) == 1 else said.pop(0))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def asking(parts: Any, urls: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """One request, which begins at the first router; the record of it."""
    load, records = parts["load"], parts["records"]
    monkeypatch.setattr(load, "AGAIN_AFTER_S", 0.0)
    clients = load.Clients(urls, [records.Question(0, (1, 2), RIGHT)], "tiny", 1, time.monotonic())
    asked = records.Asked(0, 0, 0.0, True)
    await clients._ask(asked, clients._questions[0], list(urls), None)
    await clients.stop()
    yield asked


CASES = {
    "right": ([answer(*WHOLE)], "right", [""]),
    "wrong": ([answer(event(5), event(8))], "wrong", [""]),
    "too_few": ([answer(event(5, 6), b"data: [DONE]\n\n")], "wrong", [""]),
    "refused_once": ([answer(b'{"error": {"code": "overloaded"}}', status=503, kind="application/json")],
                     "right", ["503:overloaded", ""]),
    "bare_500": ([answer(b"oh", status=500, kind="text/plain")], "right", ["500:without_code", ""]),
    "hangs_up": ([b""], "right", ["closed", ""]),
    "says_why": ([answer(event(5), failed("peer_gone"))], "cut", ["peer_gone"]),
    "says_nothing": ([answer(event(5))], "cut", ["ended_without_a_word"]),
    "cut": ([answer(event(5), is_cut=True)], "cut", ["closed_in_answer"]),
}  # fmt: skip
UNNAMED = {"500:without_code", "ended_without_a_word", "closed_in_answer"}


@pytest.mark.parametrize("case", CASES)
async def test_what_a_client_calls_it(parts: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    says, outcome, names = CASES[case]
    async with (
        Routers({"one": list(says), "other": [answer(*WHOLE)]}) as routers,
        asking(parts, routers.urls, monkeypatch) as asked,
    ):
        assert (asked.outcome, [attempt.name for attempt in asked.attempts]) == (outcome, names)
        assert [not attempt.is_named for attempt in asked.attempts] == [name in UNNAMED for name in names]
        assert routers.asked == ["one", "other"][: len(names)]


async def test_a_client_notes_the_workers_and_whether_a_token_had_come(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = account(prefill_agent="p2", decode_agent="d1")
    with_token = answer(event(5), told + failed("peer_gone"))
    without = answer(told, failed("peer_gone"))
    for said, had_token in ((with_token, True), (without, False)):
        async with Routers({"one": [said]}) as routers, asking(parts, routers.urls, monkeypatch) as asked:
            (attempt,) = asked.attempts
            assert (attempt.name, attempt.had_byte, attempt.had_token) == ("peer_gone", True, had_token)
            assert (attempt.prefill_agent, attempt.decode_agent) == ("p2", "d1")


async def test_a_client_notes_the_workers_of_a_whole_answer(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"choices": [{"token_ids": RIGHT}], "kvxfer": {"prefill": "remote", "decode_agent": "d2"}}
    said = answer(json.dumps(body).encode(), kind="application/json")
    said = said.replace(b"\r\n", b'\r\nx-kvxfer-account: {"prefill_agent": "p1", "decode_agent": null}\r\n', 1)
    async with Routers({"one": [said]}) as routers, asking(parts, routers.urls, monkeypatch) as asked:
        assert (asked.outcome, asked.transfer) == ("right", "remote")
        assert (asked.attempts[0].prefill_agent, asked.attempts[0].decode_agent) == ("p1", "d2")
        assert asked.attempts[0].had_token


async def test_an_answer_that_never_ends_has_no_name(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts["load"], "WHOLE_ANSWER_S", 0.2)

    async def halt(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(halt, "127.0.0.1", 0)
    async with server, Routers({"other": [answer(*WHOLE)]}) as routers:
        urls = {"one": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", **routers.urls}
        async with asking(parts, urls, monkeypatch) as asked:
            first, second = asked.attempts
            assert (first.name, first.is_named, second.name) == (parts["records"].TOO_LONG, False, "")


async def test_a_client_whose_router_is_not_there_asks_the_other(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{held.getsockname()[1]}"
        async with (
            Routers({"other": [answer(*WHOLE)]}) as routers,
            asking(parts, {"one": nowhere, **routers.urls}, monkeypatch) as asked,
        ):
            assert [attempt.name for attempt in asked.attempts] == ["connect_refused", ""]
            assert asked.outcome == "right"


async def test_a_client_gives_up_at_last(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = answer(b'{"error": {"code": "overloaded"}}', status=503, kind="application/json")
    async with (
        Routers({"one": [refusal], "other": [refusal]}) as routers,
        asking(parts, routers.urls, monkeypatch) as asked,
    ):
        assert asked.outcome == "failed"
        assert len(asked.attempts) == parts["load"].ATTEMPTS_MAX


# --- relay ---


@pytest.fixture
def ends(parts: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """Two sockets that the relay takes for those of its interfaces; what is sent to one comes out of the other."""
    kind = socket.SOCK_SEQPACKET
    pairs = [socket.socketpair(socket.AF_UNIX, kind) for _ in range(2)]
    inner = {"near": pairs[0][1], "far": pairs[1][1]}
    for end in inner.values():
        end.setblocking(False)
    monkeypatch.setattr(parts["relay"], "_opened", lambda name: inner[name])
    near, far = pairs[0][0], pairs[1][0]
    yield near, far
    near.close()
    far.close()


async def received(end: socket.socket) -> bytes:
    end.setblocking(False)
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(end, 4096), 20.0)


async def test_a_relay_passes_both_ways_later_and_in_order(parts: Any, ends: tuple[Any, Any]) -> None:
    near, far = ends
    relay = parts["relay"].Relay("near", "far", delay_s=0.05)
    began_s = time.monotonic()
    for number in range(20):
        near.send(struct.pack("=i", number))
    assert [struct.unpack("=i", await received(far))[0] for _ in range(20)] == list(range(20))
    assert time.monotonic() - began_s >= 0.05
    far.send(b"back")
    assert await received(near) == b"back"
    relay.close()


async def test_a_relay_loses_its_share_by_seed(parts: Any, ends: tuple[Any, Any]) -> None:
    near, _ = ends
    relay = parts["relay"].Relay("near", "far", loss=0.25, seed=4)
    for number in range(100):
        near.send(bytes([number]))
        for _ in range(3):  # the loop looks at its sockets once a turn
            await asyncio.sleep(0)
    assert relay.passed + relay.lost == 100
    assert 10 <= relay.lost <= 40
    relay.close()
