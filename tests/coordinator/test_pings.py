"""Keepalive pings of honest clients never cost them their connection; a flood of them does."""

from __future__ import annotations

import asyncio
import importlib.util
import pathlib
import struct
from typing import Any

import pytest

from kvxfer.coordinator.listening import SERVER_OPTIONS
from kvxfer.rpc.link import CHANNEL_OPTIONS, PINGS_APART_MIN_MS
from tests.support.coordinator import running

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1
ENHANCE_YOUR_CALM = 11
STRIKES = 2
"""So many pings that come too soon does gRPC forgive."""


class Http2:
    """The client's end of a connection that carries frames and no call: it says nothing but what a test has it say."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, kind: int, flags: int, payload: bytes) -> None:
        self.writer.write(struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + bytes(4) + payload)

    async def read(self) -> tuple[int, int, bytes]:
        head = await self.reader.readexactly(9)
        return head[3], head[4], await self.reader.readexactly(int.from_bytes(head[:3], "big"))

    async def ping(self, number: int) -> tuple[int, bytes]:
        """The kind and payload of the frame that answers it: PING or GOAWAY."""
        self.send(PING, 0, number.to_bytes(8, "big"))
        while True:
            kind, flags, payload = await self.read()
            if kind == GOAWAY or (kind == PING and flags & ACK):
                return kind, payload
            if kind == SETTINGS and not flags & ACK:
                self.send(SETTINGS, ACK, b"")


async def dial(address: str) -> Http2:
    host, _, port = address.rpartition(":")
    end = Http2(*await asyncio.open_connection(host, int(port)))
    end.writer.write(PREFACE)
    end.send(SETTINGS, 0, b"")
    return end


async def ping_often(address: str, count: int, apart_s: float) -> list[tuple[int, bytes]]:
    end = await dial(address)
    answers = []
    try:
        async with asyncio.timeout(20):
            for number in range(count):
                answers.append(await end.ping(number))
                if answers[-1][0] == GOAWAY:
                    break
                await asyncio.sleep(apart_s)
    finally:
        end.writer.close()
    return answers


async def test_pings_as_far_apart_as_clients_send_them_are_all_answered(tmp_path: pathlib.Path) -> None:
    """Sooner, even: a process that was stopped answers late, and the next ping comes right after."""
    async with running(tmp_path) as cluster:
        answers = await ping_often(cluster.address, STRIKES + 4, 1.5 * PINGS_APART_MIN_MS / 1000)
    assert answers == [(PING, number.to_bytes(8, "big")) for number in range(STRIKES + 4)]


async def test_a_flood_of_pings_ends_the_connection(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path) as cluster:
        answers = await ping_often(cluster.address, 200, 0)
    kind, payload = answers[-1]
    assert kind == GOAWAY
    assert int.from_bytes(payload[4:8], "big") == ENHANCE_YOUR_CALM


def test_clients_ping_more_slowly_than_the_coordinator_minds() -> None:
    ours, theirs = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)
    assert 10 * theirs["grpc.http2.min_ping_interval_without_data_ms"] <= ours["grpc.keepalive_time_ms"]
    assert theirs["grpc.keepalive_permit_without_calls"] == ours["grpc.keepalive_permit_without_calls"] == 1


@pytest.mark.parametrize("options", [CHANNEL_OPTIONS, SERVER_OPTIONS], ids=["client", "coordinator"])
def test_every_option_is_one_that_grpc_knows(options: Any) -> None:
    """gRPC says nothing of a name that it does not know, and does without."""
    found = importlib.util.find_spec("grpc._cython.cygrpc")
    assert found is not None
    assert found.origin is not None
    library = pathlib.Path(found.origin).read_bytes()
    assert [name for name, _ in options if name.encode() + b"\0" not in library] == []
