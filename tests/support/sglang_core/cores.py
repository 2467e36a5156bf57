"""Ranks of engines over numpy buffers, without SGLang: what the tests of the transport core share."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.connectors.sglang.core import TransportCore
from kvxfer.connectors.sglang.destination import DestinationCallbacks
from kvxfer.connectors.sglang.memory import Buffers, EngineMemory
from kvxfer.connectors.sglang.options import Options
from kvxfer.connectors.sglang.shape import KvShape
from kvxfer.connectors.sglang.source import RoomReader, SourceCallbacks
from kvxfer.rpc.token import load_or_create_token
from kvxfer.types import CompatibilityRecord, Role, TransferId

PAGES, ROWS = 48, 8
KV_ITEMS = (512, 512, 256, 256)
AUX_ITEMS = (64, 64, 512)
STATE_ITEMS = ((128, 384), (1024,))
POISON = 0xA5
RECORD = CompatibilityRecord(
    "m", "c0", "w0", "float32", 2, 2, 16, 16, "sglang:kv,layer,page", "plain", "rope", "torch_native"
)
Arrays = list[npt.NDArray[np.uint8]]


def buffers(arrays: Arrays) -> Buffers:
    return Buffers(
        tuple(array.ctypes.data for array in arrays),
        tuple(array.nbytes for array in arrays),
        tuple(array.shape[1] for array in arrays),
    )


def poisoned(rows: int, items: Sequence[int]) -> Arrays:
    return [np.full((rows, item), POISON, np.uint8) for item in items]


class Rank:
    """One rank: its memory, its core, and what that said."""

    CUDA_DEVICE: int | None = None

    def __init__(
        self,
        name: str,
        role: Role,
        options: Options,
        *,
        rank: int = 0,
        pages: int = PAGES,
        states: int = len(STATE_ITEMS),
        record: CompatibilityRecord = RECORD,
        shape: KvShape | None = None,
    ) -> None:
        self.name, self.rank = name, rank
        items = KV_ITEMS if shape is None else [shape.page_bytes(index) for index in range(len(shape.layers))]
        self.kv = self.place(poisoned(pages, items))
        self.aux = poisoned(ROWS, AUX_ITEMS)
        self.states = [self.place(poisoned(ROWS, items)) for items in STATE_ITEMS[:states]]
        self.events: list[tuple[Any, ...]] = []
        self._heard = threading.Condition()
        memory = EngineMemory(
            buffers(self.kv),
            buffers(self.aux),
            tuple((f"s{i}", buffers(some)) for i, some in enumerate(self.states)),
            self.CUDA_DEVICE,
            shape,
        )
        self.core = TransportCore(
            options,
            memory,
            record,
            agent_id=name,
            rank=rank,
            role=role,
            source_callbacks=SourceCallbacks(
                lambda room: self.hear("sent", room),
                lambda room, code, text: self.hear("unsent", room, code, text),
                lambda room: self.hear("began", room),
            ),
            destination_callbacks=DestinationCallbacks(
                lambda room: self.hear("done", room),
                lambda room, code, text: self.hear("failed", room, code, text),
            ),
        )
        self.sources, self.destinations = self.core.sources, self.core.destinations

    def place(self, arrays: Arrays) -> Arrays:
        """These rows, where pages and states belong."""
        return arrays

    def hear(self, *event: Any) -> None:
        with self._heard:
            self.events.append(event)
            self._heard.notify_all()

    def heard(self, what: str, room: int) -> tuple[Any, ...] | None:
        return next((event for event in self.events if event[:2] == (what, room)), None)

    def wait(self, what: str, room: int, within_s: float = 10.0) -> tuple[Any, ...]:
        """The event of that kind, once it came."""
        with self._heard:
            assert self._heard.wait_for(lambda: self.heard(what, room), within_s), f"no {what} {room}: {self.events}"
        event = self.heard(what, room)
        assert event is not None
        return event

    def none(self, *kinds: str) -> bool:
        return not [event for event in self.events if event[0] in kinds]

    @property
    def all(self) -> list[Arrays]:
        return [self.kv, *self.states, self.aux]

    def write(self, where: Arrays, rows: Sequence[int], seed: int) -> None:
        draw = np.random.default_rng(seed)
        for array in where:
            array[list(rows)] = draw.integers(0, 256, (len(rows), array.shape[1]), np.uint8)


@dataclasses.dataclass
class Copy:
    """What one room should have moved: (source rows, destination rows) of each storage."""

    kv: tuple[Sequence[int], Sequence[int]] = ((), ())
    aux: tuple[Sequence[int], Sequence[int]] = ((), ())
    states: Sequence[tuple[Sequence[int], Sequence[int]]] = ()


def check(source: Rank, destination: Rank, *copies: Copy) -> None:
    """Every row that was meant to move equals its source; every other is poisoned still."""
    for number, (theirs, ours) in enumerate(zip(source.all, destination.all, strict=True)):
        moved: list[tuple[int, int]] = []
        for copy in copies:
            states = list(copy.states) + [((), ())] * (len(source.states) - len(copy.states))
            moved += zip(*[copy.kv, *states, copy.aux][number], strict=True)
        for one, other in zip(map(np.asarray, theirs), map(np.asarray, ours), strict=True):
            expected = np.full_like(other, POISON)
            for at, to in moved:
                expected[to] = one[at]
            assert (other == expected).all(), f"storage {number}: rows {np.where((other != expected).any(1))[0]}"


def new_id() -> TransferId:
    return TransferId(secrets.token_bytes(16))


def options(directory: pathlib.Path, **changes: Any) -> Options:
    token = directory / "token"
    load_or_create_token(token)
    return dataclasses.replace(Options(token_file=str(token)), **changes)


def introduce(*ranks: Rank) -> None:
    for one, other in itertools.permutations(ranks, 2):
        one.core.add_remote_agent(other.core.export_metadata(), other.name)


@contextlib.contextmanager
def running(*ranks: Rank) -> Iterator[None]:
    """They know each other, and end with the block."""
    with contextlib.ExitStack() as stack:
        for rank in ranks:
            rank.core.start()
            stack.callback(rank.core.stop)
        introduce(*ranks)
        yield


@contextlib.contextmanager
def pair(
    directory: pathlib.Path, *, record: CompatibilityRecord = RECORD, **changes: Any
) -> Iterator[tuple[Rank, Rank]]:
    """A prefill rank ``p`` and a decode rank ``d``, which has ``record``."""
    chosen = options(directory, **changes)
    p, d = Rank("p", Role.PREFILL, chosen), Rank("d", Role.DECODE, chosen, pages=PAGES - 8, record=record)
    with running(p, d):
        yield p, d


def begin(p: Rank, d: Rank, room: int, pages: Sequence[int], aux_row: int, **more: Any) -> TransferId:
    """The decode rank wants the room; both hear of it, as over SGLang's bootstrap."""
    transfer_id = new_id()
    d.destinations.begin(room, transfer_id, [(p.name, p.rank)], pages, aux_row, **more)
    p.sources.reader(room, RoomReader(transfer_id, d.name, d.rank, len(pages)))
    return transfer_id


def open_room(p: Rank, d: Rank, room: int, pages: Sequence[int], aux_row: int, **more: Any) -> TransferId:
    """As :func:`begin`, once the prefill rank has accepted the room."""
    p.sources.accept(room)
    return begin(p, d, room, pages, aux_row, **more)


def committed(rank: Rank) -> int:
    """Transfers of it that committed so far."""
    return sum(some.get("committed", 0) for some in rank.core.statistics().agent.outcomes.values())


def until(holds: Callable[[], object], within_s: float = 10.0) -> None:
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, "it did not become so in time"
        time.sleep(0.005)


def idle(*ranks: Rank) -> None:
    """Nothing is granted, read, asked for or awaited any more."""
    for rank in ranks:
        until(lambda rank=rank: rank.core.statistics().agent.is_idle)
