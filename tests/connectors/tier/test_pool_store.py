"""The store in another process's memory: a real ``kvxfer tier`` process, and this process as the engine."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvxfer.agent import Agent
from kvxfer.config import AgentConfig
from kvxfer.connectors.tier.messages import (
    KEYS_MAX,
    TEXT_BYTES_MAX,
    Find,
    Found,
    Get,
    MoveEnded,
    Put,
    TierHello,
    TierWelcome,
    Used,
    decode,
    encode,
)
from kvxfer.connectors.tier.pool_store import PoolStore
from kvxfer.connectors.tier.store import BlockMove, BlockName, Presence
from kvxfer.errors import KvxferError
from kvxfer.rpc import load_token
from kvxfer.types import TransferId

ROW, ROWS = 16384, 16
RECORD = bytes(range(32))


def name(number: int, record: bytes = RECORD) -> BlockName:
    return BlockName(record, number.to_bytes(36, "big"))


class Service:
    """One ``kvxfer tier`` process."""

    def __init__(self, folder: pathlib.Path, blocks: int, *flags: str) -> None:
        self.token = folder / "token"
        command = [sys.executable, "-m", "kvxfer.cli", "tier", f"--capacity-bytes={blocks * ROW}", *flags]
        self.process = subprocess.Popen(
            [*command, f"--token-file={self.token}", "--agent-id=keeper", "--log-level=warning"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = json.loads(self.process.stdout.readline())["http_url"]

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line.startswith("kvxfer_tier_")]
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(20)
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def service(tmp_path: pathlib.Path) -> Iterator[Service]:
    service = Service(tmp_path, 8)
    yield service
    service.kill(signal.SIGTERM)


@pytest.fixture
def memory() -> np.ndarray:
    return np.random.Generator(np.random.PCG64(3)).integers(0, 256, (ROWS, ROW), dtype=np.uint8)


def open_store(service: Service, memory: np.ndarray, **more: float) -> PoolStore:
    agent = Agent(
        f"e-{secrets.token_hex(4)}",
        token=load_token(service.token),
        config=AgentConfig(discovery=True, stall_s=0.5, reconnect_s=1.0, transfer_deadline_s=5.0),
    )
    store = PoolStore(memory, agent, "keeper", service_url=service.url, deadline_s=5.0, **more)  # type: ignore[arg-type]
    assert store.wait_known(20)
    return store


@pytest.fixture
def store(service: Service, memory: np.ndarray) -> Iterator[PoolStore]:
    store = open_store(service, memory)
    yield store
    store.close()


def finish(act: object, moves: Sequence[BlockMove]) -> list[KvxferError | None]:
    ended, outcomes = threading.Event(), []

    def done(result: Sequence[KvxferError | None]) -> None:
        outcomes.extend(result)
        ended.set()

    act(moves, done)  # type: ignore[operator]
    assert ended.wait(30)
    return outcomes


def codes(outcomes: Sequence[KvxferError | None]) -> list[str]:
    return ["" if error is None else error.code for error in outcomes]


def save(store: PoolStore, *numbers: int) -> list[str]:
    return codes(finish(store.save, [BlockMove(name(number), number % ROWS) for number in numbers]))


def load(store: PoolStore, *numbers: int, record: bytes = RECORD) -> list[str]:
    return codes(finish(store.load, [BlockMove(name(number, record), number % ROWS) for number in numbers]))


def find(store: PoolStore, number: int) -> Presence:
    end_s = time.monotonic() + 20
    while (presence := store.find(name(number))) is Presence.ASKED:
        store.flush()
        assert time.monotonic() < end_s
        time.sleep(0.001)
    return presence


def test_blocks_go_and_come_back_and_the_service_counts(service: Service, store: PoolStore, memory: np.ndarray) -> None:
    truth = memory.copy()
    assert save(store, 1, 2, 3) == [""] * 3
    assert save(store, 2) == [""]
    memory[:] = 0
    assert load(store, 3, 1) == ["", ""]
    assert (memory[[1, 3]] == truth[[1, 3]]).all()
    assert not memory[2].any()
    assert [find(store, number) for number in (2, 7)] == [Presence.HERE, Presence.ABSENT]
    counts = service.metrics()
    assert counts["kvxfer_tier_blocks"] == 3
    assert counts["kvxfer_tier_stored_bytes_total"] == counts["kvxfer_tier_used_bytes"] == 3 * ROW
    assert counts["kvxfer_tier_served_blocks_total"] == 2
    assert (counts["kvxfer_tier_hits_total"], counts["kvxfer_tier_misses_total"]) == (1, 1)


def test_an_evicted_block_is_a_named_miss(service: Service, store: PoolStore, memory: np.ndarray) -> None:
    assert save(store, *range(8)) == [""] * 8
    assert save(store, 8, 9) == ["", ""]
    found = [number for number in range(10) if find(store, number) is Presence.HERE]
    assert len(found) == 8
    (gone, _) = [number for number in range(10) if number not in found]
    before = memory[gone].copy()
    assert load(store, gone) == ["block_missing"]
    assert (memory[gone] == before).all()
    assert service.metrics()["kvxfer_tier_evictions_total"] == 2


def test_another_record_is_another_block(store: PoolStore) -> None:
    assert save(store, 1) == [""]
    assert load(store, 1, record=bytes(32)) == ["block_missing"]


def test_two_engines_share_what_one_has_stored(service: Service, store: PoolStore, memory: np.ndarray) -> None:
    other_memory = np.zeros_like(memory)
    other = open_store(service, other_memory)
    assert save(store, 5) == [""]
    assert find(other, 5) is Presence.HERE
    assert load(other, 5) == [""]
    assert (other_memory[5] == memory[5]).all()
    other.close()


def test_a_killed_service_is_named_and_a_new_one_is_found(tmp_path: pathlib.Path, memory: np.ndarray) -> None:
    service = Service(tmp_path, 8)
    store = open_store(service, memory)
    port = service.url.rsplit(":", 1)[1]
    assert save(store, 1) == [""]
    service.process.send_signal(signal.SIGSTOP)  # so that it is killed with questions open
    ended: list[str] = []
    over = threading.Event()

    def done(outcomes: Sequence[KvxferError | None]) -> None:
        ended.extend(codes(outcomes))
        over.set()

    store.load([BlockMove(name(1), 1)], done)
    service.kill()
    assert over.wait(30)
    assert ended == ["peer_gone"]
    assert find(store, 1) is Presence.ABSENT
    assert load(store, 1) == ["peer_gone"]
    service = Service(tmp_path, 8, f"--http-port={port}")
    end_s = time.monotonic() + 30
    while find(store, 1) is Presence.ABSENT and save(store, 1) != [""]:
        assert time.monotonic() < end_s
        time.sleep(0.05)
    assert load(store, 1) == [""]
    store.close()
    service.kill(signal.SIGTERM)


def test_nobody_waits_for_a_service_that_hangs_and_it_is_believed_again_once_it_answers(
    service: Service, memory: np.ndarray
) -> None:
    store = open_store(service, memory, lookup_wait_s=0.3)
    assert save(store, 1, 2) == ["", ""]
    service.process.send_signal(signal.SIGSTOP)
    assert store.find(name(1)) is Presence.ASKED  # and never again
    store.flush()
    assert store.is_asking
    end_s = time.monotonic() + 20
    while store.is_asking:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    began_s = time.monotonic()
    assert store.find(name(2)) is Presence.ABSENT
    assert set(load(store, *range(8))) <= {"deadline", "peer_gone"}
    assert set(save(store, *range(8))) <= {"deadline", "peer_gone"}
    assert time.monotonic() - began_s < 4  # less than the deadline of one move
    service.process.send_signal(signal.SIGCONT)
    end_s = time.monotonic() + 30
    while find(store, 1) is not Presence.HERE:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert load(store, 1) == [""]
    store.close()


def test_a_store_that_is_closed_while_the_service_hangs_ends_its_moves(service: Service, memory: np.ndarray) -> None:
    store = open_store(service, memory)
    assert save(store, 1) == [""]
    service.process.send_signal(signal.SIGSTOP)
    ended: list[str] = []
    store.load([BlockMove(name(1), 1)], lambda outcomes: ended.extend(codes(outcomes)))
    store.save([BlockMove(name(2), 2)], lambda outcomes: ended.extend(codes(outcomes)))
    began_s = time.monotonic()
    store.close()
    assert time.monotonic() - began_s < 20
    assert ended == ["peer_gone", "peer_gone"]
    service.process.send_signal(signal.SIGCONT)


def test_a_pool_that_is_smaller_than_a_block_keeps_none_by_name(tmp_path: pathlib.Path, memory: np.ndarray) -> None:
    service = Service(tmp_path, 8, f"--capacity-bytes={ROW // 2}")
    store = open_store(service, memory)
    assert save(store, 1, 2) == ["store_full", "store_full"]
    assert find(store, 1) is Presence.ABSENT
    store.close()
    service.kill(signal.SIGTERM)


def test_a_client_without_the_token_gets_nothing(service: Service, store: PoolStore, memory: np.ndarray) -> None:
    assert save(store, 1) == [""]
    thief_memory = np.zeros_like(memory)
    agent = Agent("thief", token=secrets.token_bytes(32), config=AgentConfig(discovery=True, reconnect_s=1.0))
    thief = PoolStore(thief_memory, agent, "keeper", service_url=service.url, deadline_s=2.0)
    assert not thief.wait_known(1.5)
    assert thief.find(name(1)) is Presence.ABSENT
    assert load(thief, 1) == save(thief, 2) == ["peer_gone"]
    thief.close()
    assert not thief_memory.any()
    assert load(store, 1) == [""]
    assert service.metrics()["kvxfer_tier_blocks"] == 1


HOSTILE = [
    b"",
    b"\x00",
    b"\xff" * 64,
    encode(TierWelcome(1)),
    encode(Found(1, (True,) * 9)),
    encode(MoveEnded(TransferId(bytes(16)), "no such code", "words")),
    encode(TierHello(7, "no metadata")),
    encode(TierHello(8, "x" * TEXT_BYTES_MAX)),
    encode(Find(9, RECORD, (b"k",) * KEYS_MAX)),
    encode(Used(bytes(32), (b"k",) * KEYS_MAX)),
    *(encode(Put(TransferId(bytes([size % 251] * 16)), name(1), size)) for size in (0, 1, ROW + 1, 2**63, 2**64 - 1)),
    *(encode(Put(TransferId(bytes([99] * 16)), name(77), ROW)) for _ in range(2)),  # which it never grants
    *(encode(Get(TransferId(bytes([98] * 16)), name(1), size)) for size in (0, ROW, ROW, 2 * ROW, 2**64 - 1)),
    *(encode(Find(9, RECORD, (b"k",)))[:length] for length in range(1, 39, 5)),
]


def test_no_message_of_a_holder_of_the_token_ends_the_service(
    service: Service, store: PoolStore, memory: np.ndarray
) -> None:
    """Nor does it change a block of another engine."""
    truth = memory.copy()
    assert save(store, 1, 2) == ["", ""]
    with urllib.request.urlopen(service.url + "/metadata", timeout=10) as answer:
        metadata = answer.read().decode()

    async def attack() -> None:
        config = AgentConfig(discovery=True, reconnect_s=1.0)
        async with Agent("hostile", token=load_token(service.token), config=config) as agent:
            agent.add_remote_agent(metadata, "keeper")
            agent.notify("keeper", encode(TierHello(1, agent.export_metadata())))
            rng = np.random.Generator(np.random.PCG64(11))
            noise = [bytes([kind % 9]) + rng.bytes(int(rng.integers(0, 200))) for kind in range(200)]
            for payload in [*HOSTILE, *noise, encode(TierHello(2, ""))]:
                await agent.notify("keeper", payload)
            async for heard in agent.notifications():
                if decode(heard.payload) == TierWelcome(2):  # it has heard all of it
                    return

    asyncio.run(asyncio.wait_for(attack(), 60))
    memory[:] = 0
    assert load(store, 1, 2) == ["", ""]
    assert (memory[1:3] == truth[1:3]).all()
    assert service.process.poll() is None


def test_an_engine_whose_blocks_do_not_fit_the_units_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    service = Service(tmp_path, 8, "--unit-bytes=8192")
    memory = np.zeros((4, 4096), np.uint8)
    agent = Agent("e", token=load_token(service.token), config=AgentConfig(discovery=True))
    store = PoolStore(memory, agent, "keeper", service_url=service.url)
    end_s = time.monotonic() + 20
    while "multiple" not in store._why:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert store.find(name(1)) is Presence.ABSENT
    assert save(store, 1) == ["peer_gone"]
    store.close()
    service.kill(signal.SIGTERM)


def test_nothing_plain_listens_beyond_loopback_unless_asked() -> None:
    sessions = ("--bind-host=0.0.0.0", "--advertise-host=192.0.2.1")
    for flags, encrypt in ((sessions, "never"), (("--http-host=0.0.0.0",), "auto")):
        command = [sys.executable, "-m", "kvxfer.cli", "tier", "--capacity-bytes=65536", *flags]
        environ = {**os.environ, "KVXFER_ENCRYPT": encrypt}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, check=False)
        assert ended.returncode == 2
        assert "not loopback" in ended.stderr
