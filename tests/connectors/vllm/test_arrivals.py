"""What vLLM's API server says of prompts that it has: of which, to which engine, and that it never gets in a request's
way."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.connectors.vllm import arrivals as module
from kvxfer.connectors.vllm.accepted import ARRIVED_S, Accepted
from kvxfer.connectors.vllm.arrival_place import find_socket
from kvxfer.connectors.vllm.arrivals import BODY_MAX, Arrivals, ArrivalSocket, arrival_of
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.types import TransferId
from tests.support.vllm_connector.pair import until

ID = TransferId(bytes(range(16)))
SHARED = {"transfer_id": str(ID), "source": {"agent_id": "p-of-arrivals"}, "destination": {"agent_id": "d"}}
LEG = {"do_remote_decode": True, **SHARED}


def body(params: object, **more: object) -> bytes:
    return json.dumps({"prompt": "x" * 1000, "kv_transfer_params": params, **more}).encode()


def test_a_prefill_leg_that_others_wait_for_is_an_arrival() -> None:
    assert arrival_of(body(LEG)) == ("p-of-arrivals", ID)


@pytest.mark.parametrize(
    "request_body",
    [
        b"",
        b"[",
        b"[" * 10_000 + b'"do_remote_decode"',
        b'"do_remote_decode"',
        b'["do_remote_decode"]',
        body(None),
        body(["do_remote_decode"]),
        body({**SHARED, "do_remote_prefill": True}, prompt='"do_remote_decode"'),
        body({**LEG, "transfer_id": None}),
        body({**LEG, "transfer_id": 7}),
        body({**LEG, "source": None}),
        body({**LEG, "source": {"agent_id": "/"}}),
        body({name: value for name, value in LEG.items() if name != "source"}),
    ],
)
def test_anything_else_is_none(request_body: bytes) -> None:
    assert arrival_of(request_body) is None


@given(st.binary(max_size=100))
def test_any_datagram_is_an_arrival_or_none(request_body: bytes) -> None:
    assert arrival_of(b'"do_remote_decode"' + request_body) is None


class Server:
    """An ASGI application that reads its request and answers when it is told to."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.read = b""
        self.sent: list[MutableMapping[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_over = scope["type"] != "http"
        while not is_over:
            message = await receive()
            self.read += message["body"]
            is_over = not message["more_body"]
        await self.may_answer.wait()
        if not self.read:
            raise ZeroDivisionError
        await send({"type": "http.response.start"})

    async def serve(self, request_body: bytes, method: str = "POST", around: Arrivals | None = None) -> None:
        parts = iter([request_body[:100], request_body[100:]])

        async def receive() -> dict[str, Any]:
            part = next(parts)
            return {"type": "http.request", "body": part, "more_body": part == request_body[:100]}

        async def send(message: MutableMapping[str, Any]) -> None:
            self.sent.append(message)

        await (around or Arrivals(self))({"type": "http", "method": method}, receive, send)


@pytest.fixture
def seen() -> list[tuple[TransferId, bool]]:
    return []


@pytest_asyncio.fixture
async def listening(seen: list[tuple[TransferId, bool]]) -> AsyncIterator[ArrivalSocket]:
    heard = ArrivalSocket("p-of-arrivals", lambda transfer_id, is_here: seen.append((transfer_id, is_here)))
    yield heard
    heard.close()
    heard.close()


async def test_an_engine_hears_what_its_server_has(
    listening: ArrivalSocket, seen: list[tuple[TransferId, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPEAT_S", 0.05)
    server = Server()
    serving = asyncio.create_task(server.serve(body(LEG)))
    await until(lambda: seen[:3] == [(ID, True)] * 3)
    server.may_answer.set()
    await serving
    await until(lambda: seen[-1] == (ID, False))
    assert (server.read, len(server.sent)) == (body(LEG), 1)
    count = len(seen)
    await asyncio.sleep(0.15)
    assert len(seen) == count


@pytest.mark.parametrize(("content", "method"), [(body(SHARED), "POST"), (body(LEG), "GET")])
async def test_other_requests_pass(
    listening: ArrivalSocket, seen: list[tuple[TransferId, bool]], content: bytes, method: str
) -> None:
    server = Server()
    server.may_answer.set()
    await server.serve(content, method)
    await asyncio.sleep(0.05)
    assert (server.read, seen) == (content, [])


async def test_a_server_without_an_engine_serves() -> None:
    server = Server()
    server.may_answer.set()
    await server.serve(body(LEG))
    assert len(server.sent) == 1


async def test_unknown_datagram_is_ignored(listening: ArrivalSocket, seen: list[tuple[TransferId, bool]]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        for payload in (b"", b"+", b"+" + bytes(15), b"+" + bytes(17), b"x" + bytes(16), bytes(1000)):
            other.sendto(payload, find_socket("p-of-arrivals") or "")
        other.sendto(b"-" + ID.raw, find_socket("p-of-arrivals") or "")
    await until(lambda: seen == [(ID, False)])


async def test_of_two_engines_of_one_name_the_first_hears(
    listening: ArrivalSocket, seen: list[tuple[TransferId, bool]]
) -> None:
    ArrivalSocket("p-of-arrivals", lambda *_: None).close()
    server = Server()
    server.may_answer.set()
    await server.serve(body(LEG))
    await until(lambda: seen == [(ID, True), (ID, False)])


async def test_of_a_burst_every_arrival_is_heard_and_every_end(
    listening: ArrivalSocket, seen: list[tuple[TransferId, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel queues ten datagrams or so."""
    monkeypatch.setattr(module, "REPEAT_S", 60.0)
    ids = [TransferId(number.to_bytes(16, "big")) for number in range(200)]
    server = Server()
    application = Arrivals(server)
    legs = [body({**LEG, "transfer_id": str(one)}) for one in ids]
    serving = [asyncio.create_task(server.serve(leg, around=application)) for leg in legs]
    await until(lambda: {one for one, is_here in seen if is_here} == set(ids), within_s=3.0)
    server.may_answer.set()
    await asyncio.gather(*serving)
    await until(lambda: {one for one, is_here in seen if not is_here} == set(ids), within_s=3.0)
    await until(lambda: not application._saying)
    assert len(seen) == 2 * len(ids)


async def test_prompt_whose_end_cannot_be_reported_is_forgotten(
    listening: ArrivalSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGAIN_S", (0.001, 0.002))
    asyncio.get_running_loop().remove_reader(listening._socket)  # type: ignore[arg-type]
    server = Server()
    application = Arrivals(server)
    server.may_answer.set()
    await asyncio.gather(*(server.serve(body(LEG), around=application) for _ in range(20)))
    assert application._saying
    await until(lambda: not application._saying)


def test_an_engine_that_missed_an_arrival_hears_it_before_it_is_unknown() -> None:
    wait_s = ConnectorOptions.unknown_wait_s
    assert wait_s / 4 > module.AGAIN_S[1] > module.AGAIN_S[0]
    assert wait_s > module.REPEAT_S


def test_nothing_of_a_body_is_kept_once_it_was_looked_at() -> None:
    looked_at = module._Body()
    whole = body(LEG)
    assert looked_at.add({"type": "http.request", "body": whole[:50], "more_body": True}) is None
    assert len(looked_at) == 50
    assert looked_at.add({"type": "http.request", "body": whole[50:]}) == ("p-of-arrivals", ID)
    assert len(looked_at) == 0
    assert looked_at.add({"type": "http.request", "body": whole}) is None
    assert looked_at.add({"type": "http.disconnect"}) is None


def test_nothing_of_a_body_is_kept_that_is_too_long() -> None:
    body_of = module._Body()
    for _ in range(3):
        assert body_of.add({"type": "http.request", "body": bytes(BODY_MAX // 2), "more_body": True}) is None
    assert len(body_of) == 0
    assert body_of.add({"type": "http.request", "body": body(LEG), "more_body": False}) is None


@pytest.mark.parametrize(("length", "is_seen"), [(BODY_MAX - 1000, True), (BODY_MAX, False)])
async def test_long_bodies_are_not_parsed(
    listening: ArrivalSocket, seen: list[tuple[TransferId, bool]], length: int, is_seen: bool
) -> None:
    server = Server()
    server.may_answer.set()
    await server.serve(body(LEG, prompt="x" * length))
    await asyncio.sleep(0.05)
    assert [one for one, _ in seen] == [ID, ID] * is_seen
    assert len(server.read) > length


@pytest.fixture
def accepted() -> Accepted:
    accepted = Accepted(2.0)
    accepted.ask("d", ID, 0.0)
    return accepted


def asked_until(accepted: Accepted, end_s: float) -> float:
    """When the question is over, which is repeated; at most at ``end_s``."""
    for tick in range(1, round(end_s * 10)):
        accepted.ask("d", ID, tick / 10)
        if accepted.sweep(tick / 10):
            return tick / 10
    return end_s


def test_a_prompt_that_has_arrived_is_no_unknown_one(accepted: Accepted) -> None:
    accepted.arrive(ID, 1.0)
    assert ID in accepted
    (queued,) = accepted.answer([ID], 1.0, is_computing=False)
    assert (queued.positions, queued.has_work) == ((1,), False)  # its engine has nothing to do yet
    assert asked_until(accepted, 30.0) == 1.0 + ARRIVED_S  # its server says nothing more


def test_a_prompt_that_its_server_refused_is_unknown(accepted: Accepted) -> None:
    accepted.arrive(ID, 1.0)
    accepted.ask("d", ID, 4.0)
    assert accepted.sweep(4.0) == []
    accepted.leave(ID)
    assert accepted.sweep(4.1) == [("d", ID)]


def test_a_prompt_that_has_arrived_is_accepted_once(accepted: Accepted) -> None:
    accepted.arrive(ID, 1.0)
    accepted.accept(ID)
    accepted.arrive(ID, 6.0)
    assert accepted.take(ID) == ["d"]
    assert ID not in accepted
