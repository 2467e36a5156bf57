"""Agents that meet by an address, without a coordinator: both hold the cluster token, or nothing happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from agent_support import BLOCK_BYTES, RECORD, Coordinator, fresh_id, info, until

from kvxfer import Agent, AgentConfig
from kvxfer.agent import introductions, peers
from kvxfer.errors import (
    AuthenticationFailed,
    InvalidArgument,
    KvxferError,
    PeerGone,
    ProtocolViolation,
    Refused,
)
from kvxfer.protocol.introduction import MAGIC, NONCE_BYTES, PROOF_BYTES, Exchange, Step
from kvxfer.types import Incarnation

TOKEN = b"a token that both of them hold"
CONFIG = AgentConfig(introductions=True, stall_s=0.3, reconnect_s=0.6)
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def make(name: str, token: bytes = TOKEN, coordinator: str | None = None) -> Agent:
    agent = Agent(info(name), coordinator=coordinator, token=token, config=CONFIG)
    agent.allocate_pool(RECORD, block_count=8, block_bytes=BLOCK_BYTES)
    return agent


@contextlib.asynccontextmanager
async def somebody(serve: Serve) -> AsyncIterator[str]:
    """Another server, and its address. Each connection is hung up when ``serve`` is through with it."""
    tasks: list[asyncio.Task[None]] = []

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())  # type: ignore[arg-type]
        with contextlib.suppress(ConnectionError):
            await serve(reader, writer)
            writer.close()
            await writer.wait_closed()

    async with await asyncio.start_server(welcome, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*tasks)


async def move(source: Agent, destination: Agent, seed: int = 1) -> None:
    """One block, from the one to the other."""
    source.pools[0].array[2] = seed
    transfer_id = fresh_id()
    source.grant(source.pools[0], [2], transfer_id=transfer_id, reader=destination.info.agent_id, ready_blocks=1)
    await destination.pull(destination.pools[0], [5], transfer_id=transfer_id, source=source.info.agent_id)
    assert (destination.pools[0].array[5] == seed).all()


async def test_two_that_met_move_blocks_either_way() -> None:
    async with make("p") as p, make("d") as d:
        member = await d.meet(p.introduction_address, "p", timeout_s=5)
        assert (member.ref, member.address, member.pools) == (p.ref, p.address, (p.pools[0].published,))
        await move(p, d)
        await move(d, p, 2)
        assert await d.meet("127.0.0.1:1", "p", timeout_s=5) == member  # nobody is dialed for who is known
        assert await p.wait_member("d", timeout_s=0, incarnation=d.ref.incarnation) == p.members()[0]


async def test_of_many_that_seek_at_once_one_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introductions, "GUESTS_MAX", 1)
    async with make("p") as p, make("d") as d:
        met = await asyncio.gather(*(d.meet(p.introduction_address, "p", timeout_s=5) for _ in range(100)))
        assert {member.ref for member in met} == {p.ref}


async def test_another_token_meets_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with make("p") as p, make("d", token=b"some other token") as d:
        with pytest.raises(AuthenticationFailed):
            await d.meet(p.introduction_address, "p", timeout_s=5)
        assert not p.members()
        assert not d.members()


async def test_a_guest_without_the_token_is_told_nothing_and_not_known(caplog: pytest.LogCaptureFixture) -> None:
    async with make("p") as p:
        host, port = introductions.split_address(p.introduction_address)
        reader, writer = await asyncio.open_connection(host, port)
        ours = bytes(NONCE_BYTES)
        writer.write(MAGIC + ours)
        theirs = await reader.readexactly(NONCE_BYTES)
        await reader.readexactly(PROOF_BYTES)
        card = b"anything"
        writer.write(Exchange(b"a guess", ours, theirs).proof(Step.GUEST, card) + len(card).to_bytes(4, "big") + card)
        assert await reader.read() == b""
        assert not p.members()
        writer.close()
        await until(lambda: "does not hold this cluster's token" in caplog.text)


async def test_a_host_without_the_token_hears_a_nonce_only() -> None:
    heard = bytearray()

    async def guess(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.extend(await reader.readexactly(len(MAGIC) + NONCE_BYTES))
        writer.write(os.urandom(NONCE_BYTES + PROOF_BYTES))
        heard.extend(await reader.read())

    async with make("d") as d, somebody(guess) as address:
        with pytest.raises(AuthenticationFailed):
            await d.meet(address, "p", timeout_s=5)
        assert not d.members()
    assert len(heard) == len(MAGIC) + NONCE_BYTES


async def test_what_a_host_proved_to_one_guest_does_for_no_other() -> None:
    """A proof of an earlier exchange, or of the other side, is none."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(MAGIC) + NONCE_BYTES)
        host, port = introductions.split_address(p.introduction_address)
        real, to_real = await asyncio.open_connection(host, port)
        to_real.write(MAGIC + os.urandom(NONCE_BYTES))  # not the guest's
        writer.write(await real.readexactly(NONCE_BYTES + PROOF_BYTES))
        to_real.close()
        await reader.read()

    async with make("p") as p, make("d") as d, somebody(echo) as address:
        with pytest.raises(AuthenticationFailed):
            await d.meet(address, "p", timeout_s=5)


async def test_only_the_name_and_the_life_that_were_looked_for() -> None:
    async with make("p") as p, make("d") as d:
        with pytest.raises(PeerGone, match="is not at"):
            await d.meet(p.introduction_address, "q", timeout_s=5)
        with pytest.raises(PeerGone, match="restarted"):
            await d.meet(p.introduction_address, "p", timeout_s=5, incarnation=Incarnation(1, bytes(16)))
        assert not d.members()
        with pytest.raises(PeerGone, match="not to be had"):
            await d.meet(d.introduction_address, "x", timeout_s=5)  # itself
        await d.meet(p.introduction_address, "p", timeout_s=5, incarnation=p.ref.incarnation)


async def test_the_next_life_takes_the_place_of_the_one_before() -> None:
    async with make("d") as d:
        async with make("p") as p:
            await d.meet(p.introduction_address, "p", timeout_s=5)
            old = p.ref
        async with make("p") as p:
            await d.meet(p.introduction_address, "p", timeout_s=5, incarnation=p.ref.incarnation)
            assert [member.ref for member in d.members()] == [p.ref] != [old]
            await move(p, d)


async def test_nobody_there_and_nobody_who_answers() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with make("d") as d, somebody(silent) as address:
        with pytest.raises(PeerGone, match="did not answer"):
            await d.meet(address, "p", timeout_s=0.1)
        with pytest.raises(PeerGone, match="not to be had"):
            await d.meet("127.0.0.1:1", "p", timeout_s=5)


@pytest.mark.parametrize("address", ["", "p", "localhost:80", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "[::1]:x"])
async def test_an_address_is_an_ip_address_and_a_port(address: str) -> None:
    async with make("d") as d:
        with pytest.raises(InvalidArgument, match="IP address and a port"):
            await d.meet(address, "p", timeout_s=1)


async def test_without_introductions_nobody_is_dialed_or_listened_to() -> None:
    async with Agent(info("d")) as d:
        assert d.introduction_address == ""
        with pytest.raises(InvalidArgument, match="turned off"):
            await d.meet("127.0.0.1:1", "p", timeout_s=1)


async def test_who_was_announced_is_not_replaced_by_an_introduction(coordinator: Coordinator) -> None:
    token = coordinator.token
    async with make("d", token, coordinator.target) as d, make("p", token, coordinator.target) as p:
        await d.wait_member("p", timeout_s=10)
        async with make("p", token) as other, make("x", token) as x:
            with pytest.raises(Refused, match="announced"):
                await d.meet(other.introduction_address, "p", timeout_s=5, incarnation=other.ref.incarnation)
            assert [member.ref for member in d.members()] == [p.ref]
            await x.meet(d.introduction_address, "d", timeout_s=5)  # of none of them the coordinator knows
            await move(x, d)
        await move(p, d)


async def test_an_announcement_takes_the_place_of_an_introduction(coordinator: Coordinator) -> None:
    token = coordinator.token
    async with make("d", token, coordinator.target) as d, make("p", token) as unannounced:
        await d.meet(unannounced.introduction_address, "p", timeout_s=5)
        async with make("p", token, coordinator.target) as p:
            await until(lambda: [member.ref for member in d.members()] == [p.ref])
            await p.wait_member("d", timeout_s=10)
            await move(p, d)


async def test_more_than_can_be_kept_are_forgotten_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "INTRODUCED_MAX", 2)
    async with make("d") as d, make("a") as a, make("b") as b, make("c") as c:
        for other in (a, b, c):
            await other.meet(d.introduction_address, "d", timeout_s=5)
        assert [member.ref for member in d.members()] == [b.ref, c.ref]


async def test_strangers_that_say_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introductions, "GUESTS_MAX", 2)
    monkeypatch.setattr(introductions, "GUEST_S", 0.1)
    async with make("p") as p, make("d") as d, contextlib.AsyncExitStack() as stack:
        host, port = introductions.split_address(p.introduction_address)
        for _ in range(5):
            _, writer = await asyncio.open_connection(host, port)
            stack.callback(writer.close)
        with contextlib.suppress(PeerGone):
            await d.meet(p.introduction_address, "p", timeout_s=1)
        await asyncio.sleep(0.5)
        await d.meet(p.introduction_address, "p", timeout_s=5)


async def test_whatever_a_host_says_is_one_error() -> None:
    """Of one that holds the token, too: its card may be anything."""
    draw = random.Random(7)

    async def host(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await reader.readexactly(len(MAGIC) + NONCE_BYTES)
        nonce = bytes(NONCE_BYTES)
        exchange = Exchange(TOKEN, hello[len(MAGIC) :], nonce)
        writer.write(nonce + exchange.proof(Step.HOST))
        await reader.readexactly(PROOF_BYTES)
        theirs = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
        cut = draw.randrange(len(theirs))
        ours = draw.choice([theirs[:cut], os.urandom(cut), theirs[:cut] + os.urandom(4) + theirs[cut:], b""])
        writer.write(exchange.proof(Step.MET, theirs, ours) + len(ours).to_bytes(4, "big") + ours)

    async with make("d") as d, somebody(host) as address:
        for _ in range(50):
            with pytest.raises(KvxferError) as raised:
                await d.meet(address, "p", timeout_s=5)
            assert isinstance(raised.value, (ProtocolViolation, PeerGone, Refused))
        assert not d.members()


async def test_a_card_beyond_all_bounds_is_not_waited_for() -> None:
    async def host(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await reader.readexactly(len(MAGIC) + NONCE_BYTES)
        nonce = bytes(NONCE_BYTES)
        writer.write(nonce + Exchange(TOKEN, hello[len(MAGIC) :], nonce).proof(Step.HOST))
        writer.write(bytes(PROOF_BYTES) + b"\xff\xff\xff\xff")
        await reader.read()

    async with make("d") as d, somebody(host) as address:
        with pytest.raises(ProtocolViolation, match="bytes"):
            await d.meet(address, "p", timeout_s=5)
