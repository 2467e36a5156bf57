"""What a prefill rank knows of rooms before their transfer: which decode ranks registered, which of them want a room,
and whether SGLang has a sender for it. Decides when both are there, and which side learns that a room fails; must never
import SGLang, nor know how pages travel.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from typing import Any, Protocol

from kvxfer.connectors.sglang.core import TransportCore
from kvxfer.connectors.sglang.greetings import Abort, Refused, Register, Registered, RoomFailed, RoomRequest
from kvxfer.connectors.sglang.limits import Identity, check_peer
from kvxfer.connectors.sglang.shape import KvShape, asking
from kvxfer.connectors.sglang.source import RoomReader
from kvxfer.errors import InvalidArgumentError, KvxferError

log = logging.getLogger("kvxfer.sglang")

EARLY_MAX = 4096
EARLY_S = 600.0
"""How long, and how many, requests for rooms without a sender in SGLang are kept."""
OVER_MAX = 4096
OVER_S = 5.0
"""How long a failed room is remembered, for a decode rank that asks later."""


class PrefillEngine(Protocol):
    """What this side uses of SGLang's manager. From any thread."""

    def tell(self, address: tuple[str, int], greeting: Any) -> None: ...

    def fail(self, room: int, text: str) -> None: ...

    def ready(self, room: int, wanted: list[Wanted]) -> None: ...

    def why_unknown(self) -> str | None: ...

    def identity(self) -> Identity: ...


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One decode rank's request for a room, with the names that SGLang's manager reads. ``decode_prefix_len`` is a
    whole number of pages here; ``reader.lead`` are the tokens beyond it that decode also has."""

    room: int
    endpoint: str
    dst_port: int
    is_dummy: bool
    required_dst_info_num: int
    decode_prefix_len: int
    reader: RoomReader


@dataclasses.dataclass(frozen=True)
class Peer:
    """A registered decode rank. ``asking``: how many of its engine's ranks want each room of this rank, if known."""

    agent_id: str
    rank: int
    shape: KvShape | None = None
    asking: int | None = None
    requires_dcp_relayout: bool = False


@dataclasses.dataclass(frozen=True)
class _Over:
    code: str
    text: str
    at_s: float
    by_decode: bool = False


class PrefillSide:
    """Of one rank. From any thread."""

    def __init__(self, engine: PrefillEngine, core: TransportCore, rank: int) -> None:
        self._engine = engine
        self._core = core
        self._rank = rank
        self._lock = threading.RLock()
        self._open: set[int] = set()
        self._entered: set[int] = set()
        self._wanted: dict[int, dict[str, Wanted]] = {}
        self._early: collections.OrderedDict[int, float] = collections.OrderedDict()
        self._over: collections.OrderedDict[int, _Over] = collections.OrderedDict()
        self.peers: dict[str, Peer] = {}

    # --- SGLang's senders ---

    def has(self, room: int) -> bool:
        """Whether a sender has that room."""
        with self._lock:
            return room in self._open

    def open(self, room: int, traceparent: str | None = None) -> None:
        """SGLang made a sender for the room, in a request with that ``traceparent``. Raises InvalidArgumentError if the
        core has the room already, ClosedError."""
        with self._lock:
            over = self._over.pop(room, None)
            self._core.sources.accept(room, traceparent)
            self._open.add(room)
            self._early.pop(room, None)
            if over is not None and over.by_decode and time.monotonic() - over.at_s < OVER_S:
                self._engine.fail(room, over.text)
            else:
                self._enter_if_complete(room)

    def close(self, room: int, failed: str | None) -> None:
        """The sender has finished with the room; ``failed``: why the room failed. When this returns its pages may be
        reused. May be called twice."""
        if failed is not None:
            self._core.sources.abort(room, failed)
        self._core.sources.clear(room)
        with self._lock:
            if room not in self._open:
                return
            self._open.discard(room)
            wanted = self._wanted.pop(room, {})
            told = [] if room in self._entered else list(wanted.values())  # agents tell those of a room that began
            self._entered.discard(room)
            if failed is not None:
                self._remember(room, _Over("refused", failed, time.monotonic()))
        for each in told:
            self._tell_failed(each, "refused", failed or "the prefill engine did not send it")

    # --- decode ranks ---

    def register(self, greeting: Register, address: tuple[str, int]) -> None:
        """A decode rank registered, and is answered with our agent, or why not."""
        ours, shape = self._engine.identity(), greeting.shape
        try:
            check_peer(ours, Identity(greeting.record, greeting.layout, shape))
            self._core.share(shape)
        except KvxferError as error:
            log.warning("decode at %s:%d is refused: %s", *address, error)
            self._engine.tell(address, Refused(error.code, str(error)))
            return
        self._core.add_remote_agent(greeting.agent_metadata, greeting.agent_id)
        count = None if ours.shape is None or shape is None else asking(ours.shape, shape)
        self.peers[greeting.agent_id] = Peer(greeting.agent_id, greeting.rank, shape, count)
        self._engine.tell(
            address, Registered(self._core.agent_id, self._rank, self._core.export_metadata(), ours.shape)
        )

    def want(self, greeting: RoomRequest, address: tuple[str, int]) -> None:
        """A decode rank wants a room."""
        peer, ours = self.peers.get(greeting.agent_id), self._engine.identity().shape
        lead = 0 if ours is None else greeting.prefix_tokens % ours.page_tokens
        shape = None if peer is None else peer.shape
        reader = RoomReader(greeting.transfer_id, greeting.agent_id, greeting.rank, greeting.pages, shape, lead)
        prefix = greeting.prefix_tokens - lead
        wanted = Wanted(greeting.room, *address, greeting.is_dummy, greeting.required, prefix, reader)
        why = self._engine.why_unknown()
        if why is not None:
            self._tell_failed(wanted, "weights_unknown", f"weights_fingerprint is not known there: {why}")
            return
        with self._lock:
            refusal = self._add(wanted)
        if refusal is not None:
            self._tell_failed(wanted, *refusal)

    def abort(self, greeting: Abort) -> None:
        """A decode rank aborted a room, also one that no rank has requested yet."""
        text = f"the decode engine gave it up: {greeting.text}"
        with self._lock:
            wanted = self._wanted.get(greeting.room, {})
            is_its = any(str(each.reader.transfer_id) == greeting.transfer_id for each in wanted.values())
            if not is_its and (wanted or greeting.transfer_id):
                return
            if greeting.room not in self._open:
                self._wanted.pop(greeting.room, None)
                self._early.pop(greeting.room, None)
                self._remember(greeting.room, _Over("cancelled", text, time.monotonic(), by_decode=True))
                return
        self._core.sources.abort(greeting.room, text)
        self._engine.fail(greeting.room, text)

    def _add(self, wanted: Wanted) -> tuple[str, str] | None:
        """Keep the request. Returns why it was refused, as an error's code and text, or ``None``."""
        room, agent_id = wanted.room, wanted.reader.agent_id
        peer = self.peers.get(agent_id)
        if peer is None:
            return "peer_gone", "the prefill rank that you registered at is another process now"
        said = wanted.reader.rank, wanted.required_dst_info_num
        known = peer.rank, said[1] if peer.asking is None else peer.asking
        if said != known:
            due = "rank {}, one of {} that ask this rank"
            return "protocol", f"room {room}: it is {due.format(*known)}, and says that it is {due.format(*said)}"
        over = self._over.get(room)
        if over is not None and room not in self._open and time.monotonic() - over.at_s < OVER_S:
            return over.code, over.text
        others = self._wanted.get(room, {})
        if room in self._entered or any(not _belong(wanted, other) for other in others.values()):
            return "refused", f"room {room} is in use: another request has it"
        self._wanted.setdefault(room, {})[agent_id] = wanted
        if room in self._open:
            self._enter_if_complete(room)
        else:
            self._keep_early(room)
        return None

    def _enter_if_complete(self, room: int) -> None:
        wanted = list(self._wanted.get(room, {}).values())
        if not wanted or len(wanted) < wanted[0].required_dst_info_num or room in self._entered:
            return
        self._entered.add(room)
        try:
            for each in wanted:
                if not each.is_dummy:
                    self._core.sources.reader(room, each.reader)
        except (InvalidArgumentError, KvxferError) as error:
            self._engine.fail(room, f"{error.code}: {error}")
            return
        self._engine.ready(room, wanted)

    def _keep_early(self, room: int) -> None:
        now_s = time.monotonic()
        self._early.setdefault(room, now_s)
        while self._early:
            oldest, at_s = next(iter(self._early.items()))
            if len(self._early) <= EARLY_MAX and now_s - at_s < EARLY_S:
                return
            del self._early[oldest]
            self._wanted.pop(oldest, None)

    def _remember(self, room: int, over: _Over) -> None:
        self._over[room] = over
        while len(self._over) > OVER_MAX:
            self._over.popitem(last=False)

    def _tell_failed(self, wanted: Wanted, code: str, text: str) -> None:
        failed = RoomFailed(wanted.room, wanted.reader.transfer_id, code, text)
        self._engine.tell((wanted.endpoint, wanted.dst_port), failed)


def _belong(one: Wanted, other: Wanted) -> bool:
    """Whether they can be two ranks of one engine that want one prompt."""
    is_other = one.reader.agent_id != other.reader.agent_id and one.reader.rank != other.reader.rank
    named = [(each.required_dst_info_num, each.decode_prefix_len, each.reader.lead) for each in (one, other)]
    return is_other and named[0] == named[1]
