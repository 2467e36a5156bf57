"""Prompts that are computed here and wanted elsewhere: what is promised of their blocks, to whom, and until when.

A prompt has one reader: the engine that the request named, or the first that comes for it, in whatever way. What any
other says of it is answered with a refusal, and changes nothing. Each rank of this engine sees only what comes to
itself: which engine was first is decided at the first rank, where readers of the other ranks claim the prompt.

A *hold* is one prompt. While vLLM computes it the hold is open, and each forward's blocks are granted as one *part* to
every rank that asked, announced layer by layer. Once vLLM has finished it, its blocks stay until all readers have what
they need, until its time is over, or until its reader is dead; then, and only after no grant over them is alive, the
blocks are given back. The bytes are safe without any of this: each is read under a grant that the native core judges.

The forward thread begins and announces steps; everything else happens on the agent's loop. One lock guards the table.
What is said to be written is said through ``after``: of a device's memory once the device has written it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvxfer.agent import Agent, Grant, Pool
from kvxfer.connectors.common.ids import DIRECT, engine_of, part_id, rank_agent
from kvxfer.connectors.common.outbox import Outbox
from kvxfer.connectors.common.pauses import Pauses
from kvxfer.connectors.vllm.accepted import Accepted
from kvxfer.connectors.vllm.early import Early, Question, another, crowded, refusal, unknown
from kvxfer.connectors.vllm.fences import Act, at_once
from kvxfer.connectors.vllm.hold import Ended, Hold, Reader
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.pages import Pages
from kvxfer.connectors.vllm.parts import Announcing, Granting, PartGrant, announce
from kvxfer.connectors.vllm.steps import Chunk, Close, Finish, Open, Revoke, StepOrders
from kvxfer.connectors.vllm.wire import (
    PARTS_MAX,
    Ask,
    Await,
    Begun,
    Claim,
    Claimed,
    Keep,
    Message,
    Part,
    Release,
    encode,
)
from kvxfer.errors import (
    GrantExpiredError,
    GrantReleasedError,
    GrantRevokedError,
    GrantUnknownError,
    KvxferError,
    OverloadedError,
    PeerGoneError,
    from_code,
)
from kvxfer.types import GrantState, TransferId

log = logging.getLogger("kvxfer.vllm")

SWEEP_S = 0.1
SILENT_S = 2.5
"""A reader that has spoken says every half second that it is still there; one that was silent for so long is gone."""

_ELSEWHERE = "the prompt's blocks go to others"


class Source:
    """The holds of one rank."""

    def __init__(
        self,
        agent: Agent,
        pools: tuple[Pool, ...],
        pages: Pages,
        options: ConnectorOptions,
        rank: int,
        post: Callable[..., None],
        on_freed: Callable[[str], None],
        after: Callable[[Act], None] = at_once,
    ) -> None:
        """``post(function, *arguments)`` calls on the agent's loop. ``on_freed(request_id)``: its blocks are vLLM's
        again. ``after(act)`` calls it once what the forward thread asked of the memory's device is done."""
        self._agent = agent
        self._pools = pools
        self._pages = pages
        self._options = options
        self._rank = rank
        self._post = post
        self._on_freed = on_freed
        self._after = after
        self._lock = threading.RLock()
        self._holds: dict[str, Hold] = {}
        self._by_transfer: dict[TransferId, Hold] = {}
        self._accepted = Accepted(options.unknown_wait_s)
        self._early = Early(self._accepted)
        self._ended = Ended()
        self._writing: list[Hold] = []
        self._read: list[str] = []
        """Prompts whose reader has begun, for the scheduler half."""
        self._outbox = Outbox(agent)
        """On the loop."""
        self._pauses = Pauses(SWEEP_S)
        layers = len(pages.layers)
        self._granting = Granting(agent, pools, pages.stores, rank, options.hold_ttl_s)
        self._announcing = Announcing(layers, options.announce_layers or max(1, layers // 8), after)
        self.expired = 0

    def __len__(self) -> int:
        return len(self._holds)

    def take_expired(self) -> int:
        """Prompts that nobody fetched in time, since the last call."""
        with self._lock:
            expired, self.expired = self.expired, 0
        return expired

    def take_read(self) -> tuple[str, ...]:
        """Prompts whose reader began to read, since the last call."""
        with self._lock:
            read, self._read = tuple(self._read), []
        return read

    # --- the forward thread ---

    def begin_step(self, orders: StepOrders) -> None:
        """What the coming forward overwrites is revoked when this returns; what it completes is granted."""
        if self._writing or self._announcing:  # vLLM does not say of each forward that it failed
            self.step_failed()
        with self._lock:
            self._accepted.step_began(time.monotonic())
            for accept in orders.accepts:
                self._accepted.accept(accept.transfer_id)
            for close in orders.closes:
                self._close(close)
            for begun in orders.opens:
                self._open(begun)
            for finish in orders.finishes:
                self._finish(finish)
            for revoke in orders.revokes:
                self._take_back(revoke)
            for chunk in orders.chunks:
                self._extend(chunk)

    def layer_saved(self, layer: int) -> None:
        """The forward wrote its part of one layer."""
        self._announcing.layer_saved(layer)

    def step_saved(self) -> None:
        """The forward wrote everything."""
        self._announcing.all_saved()
        with self._lock:
            written = [(hold, len(hold.blocks)) for hold in self._writing]
            self._writing = []
        if written:
            self._after(functools.partial(self._settle, written))

    def step_failed(self) -> None:
        """The forward broke: nothing of what it should have written is promised any more."""
        self._announcing.drop()
        with self._lock:
            for hold in list(self._writing):
                self._end(hold, GrantRevokedError("the forward that should have computed it failed"))

    def step_over(self) -> None:
        """The engine has come to the end of its step."""
        with self._lock:
            self._accepted.step_over()

    def _open(self, order: Open) -> None:
        hold = Hold.of(order, order.total, self._lease_end_s())
        self._admit(hold)
        self._hear_early_releases(hold)

    def _extend(self, order: Chunk) -> None:
        hold = self._holds.get(order.request_id)
        if hold is None:
            return
        for reader in hold.readers.values():
            self._catch_up(hold, reader)
        hold.blocks += order.blocks
        self._writing.append(hold)
        if not self._options.overlap:
            return
        for reader in hold.readers.values():
            count = len(hold.blocks) - reader.sent  # it may have the first of them in its cache
            if count > 0:
                self._announcing.add(self._grant_part(hold, reader, reader.sent, count))

    def _finish(self, order: Finish) -> None:
        hold = self._holds.get(order.request_id)
        now_s = time.monotonic()
        if hold is None:
            hold = Hold.of(order, len(order.blocks), self._lease_end_s(), order.blocks)
            self._admit(hold)
        else:
            hold.blocks = list(order.blocks)
            hold.total = len(hold.blocks)
        if not hold.readers and not hold.is_released:  # it may come with what the router was answered
            self._grant_directly(hold)
        elif order.reader is None:  # another may wait for that already
            self._decline_directly(hold)
        self._hear_early_releases(hold)
        self._after(functools.partial(self._settle, [(hold, hold.total)]))
        hold.until_s = now_s + self._options.hold_ttl_s
        if hold.is_released:
            self._free(hold, GrantReleasedError("the reader gave it back"))

    def _grant_directly(self, hold: Hold) -> None:
        """The whole prompt, to its reader, or to the first that comes: one that waits for it already is the first."""
        reader = None if hold.reader is None else rank_agent(hold.reader, self._rank)
        direct = self._grant(hold, reader, self._rank, DIRECT, hold.blocks)
        hold.direct = {part.grant.transfer_id for part in direct}
        hold.decisive = direct[0].grant if direct else None
        self._after(functools.partial(announce, direct, len(self._pages.layers)))

    def _decline_directly(self, hold: Hold) -> None:
        for index in range(len(self._pools)):
            with contextlib.suppress(KvxferError):
                self._agent.abort_grant(part_id(hold.transfer_id, self._rank, self._rank, DIRECT, index))

    def _close(self, order: Close) -> None:
        hold = self._holds.get(order.request_id)
        error = from_code(order.code, order.reason)
        if hold is not None:
            self._end(hold, error)
            if order.will_resume and hold.reader is not None:
                for rank in hold.released:
                    release = Release(hold.transfer_id, rank, hold.readers_expected)
                    self._early.release(rank_agent(hold.reader, rank), release, time.monotonic())
        if order.will_resume:
            self._ended.forget(order.transfer_id)
            self._accepted.accept_again(order.transfer_id)
            return
        self._ended.remember(order.transfer_id, error, None if hold is None else hold.reader)
        for agent_id, ask in self._early.take_asks(order.transfer_id):
            self._send(agent_id, refusal(ask, error))
        for agent_id in self._accepted.take(order.transfer_id):
            self._send(agent_id, Begun(order.transfer_id, error.code, str(error)))

    def _take_back(self, order: Revoke) -> None:
        hold = self._holds.get(order.request_id)
        if hold is not None and hold.until_s is not None:
            self._free(hold, GrantRevokedError(order.reason))

    def _lease_end_s(self) -> float:
        return time.monotonic() + self._options.hold_life_max_s

    def _admit(self, hold: Hold) -> None:
        """Know a new hold, and what came for it before."""
        previous = self._by_transfer.get(hold.transfer_id)
        if previous is not None:
            end = self._end if previous.until_s is None else self._free
            end(previous, GrantRevokedError("another request came with the same transfer id"))
        self._ended.forget(hold.transfer_id)
        self._holds[hold.request_id] = hold
        self._by_transfer[hold.transfer_id] = hold
        for agent_id, ask in self._early.take_asks(hold.transfer_id):
            self._join(hold, ask, agent_id)
        for agent_id in self._accepted.take(hold.transfer_id):
            self._awaited(agent_id, hold.transfer_id)

    def _hear_early_releases(self, hold: Hold) -> None:
        """After all that wants it: of two engines, the one that gave it up is not the reader."""
        for agent_id, release in self._early.take_releases(hold.transfer_id):
            self._give_back(hold, agent_id, release)

    # --- the loop ---

    def on_message(self, agent_id: str, message: Message) -> None:
        """What a reader says."""
        with self._lock:
            if isinstance(message, Keep):
                for transfer_id in message.transfer_ids:
                    hold = self._by_transfer.get(transfer_id)
                    if hold is not None:
                        hold.hear(agent_id, time.monotonic())
            elif isinstance(message, Await):
                self._await(agent_id, message)
            elif isinstance(message, (Ask, Claim)):
                self._asked(agent_id, message)
            elif isinstance(message, Release):
                self._accepted.forget(agent_id, message.transfer_id)
                hold = self._by_transfer.get(message.transfer_id)
                if hold is not None:
                    self._give_back(hold, agent_id, message)
                elif message.transfer_id not in self._ended:
                    self._early.release(agent_id, message, time.monotonic())

    def sweep(self) -> None:
        """Look at what is over."""
        self._outbox.flush()
        now_s = time.monotonic()
        known = {member.ref.agent_id for member in self._agent.members()}
        with self._lock:
            paused_s = self._pauses.look(now_s)
            for hold in list(self._holds.values()):
                hold.put_off(paused_s)
                self._look_at(hold, now_s, known)
            for agent_id, ask in self._early.expire(now_s):
                self._send(agent_id, refusal(ask, unknown()))
            for agent_id, transfer_id in self._accepted.sweep(now_s):
                self._send(agent_id, Begun(transfer_id, GrantUnknownError.code, str(unknown())))

    def _look_at(self, hold: Hold, now_s: float, known: set[str]) -> None:
        self._tell_read(hold)
        names = {reader.agent_id for reader in hold.readers.values()} or set(filter(None, [hold.reader]))
        if names and names <= known:
            hold.was_reader_seen = True
        elif names and hold.was_reader_seen:
            self._reader_gone(hold, "is gone")
            return
        for name in [name for name, heard_s in hold.heard_s.items() if now_s - heard_s >= SILENT_S]:
            del hold.heard_s[name]
            if hold.reader is not None:
                self._reader_gone(hold, f"said nothing for {SILENT_S:g} s")
                return
        if hold.until_s is None:
            return
        is_read = bool(hold.heard_s) or any(grant.state is GrantState.ALIVE for grant in hold.grants.values())
        if now_s >= (hold.lease_end_s if is_read else hold.until_s):
            self.expired += 1
            log.warning("a prompt was not fetched in time", extra={"request_id": hold.request_id})
            self._free(hold, GrantExpiredError("it was not fetched in time"))

    def arrival(self, transfer_id: TransferId, is_here: bool) -> None:
        """The API server has got that prompt, or is through with it."""
        with self._lock:
            if not is_here:
                self._accepted.leave(transfer_id)
            elif transfer_id not in self._by_transfer and transfer_id not in self._ended:
                self._accepted.arrive(transfer_id, time.monotonic())

    def _tell_read(self, hold: Hold) -> None:
        if not hold.has_told_read and hold.is_read:
            hold.has_told_read = True
            self._read.append(hold.request_id)

    def _await(self, agent_id: str, message: Await) -> None:
        now_s = time.monotonic()
        waiting = [one for one in message.transfer_ids if not self._awaited(agent_id, one)]
        kept = [one for one in waiting if self._accepted.ask(agent_id, one, now_s)]
        for transfer_id in set(waiting).difference(kept):
            self._send(agent_id, Begun(transfer_id, OverloadedError.code, str(crowded())))
        is_computing = any(hold.until_s is None for hold in self._holds.values())
        for answer in self._accepted.answer(kept, now_s, is_computing=is_computing):
            self._send(agent_id, answer)

    def _awaited(self, agent_id: str, transfer_id: TransferId) -> bool:
        """Tell that agent, where it is so, that a prompt that it awaits has begun, or never will. It becomes no reader
        by that."""
        hold = self._by_transfer.get(transfer_id)
        error: KvxferError | None = None
        if hold is None:
            error, _ = self._ended.find(transfer_id)
            if error is None or transfer_id in self._accepted:
                return False
        elif hold.find_reader(self._rank) not in (None, agent_id):
            error = another()
        self._send(agent_id, Begun(transfer_id, error.code if error else "", str(error) if error else ""))
        return True

    def _asked(self, agent_id: str, ask: Question) -> None:
        hold = self._by_transfer.get(ask.transfer_id)
        if hold is not None:
            self._join(hold, ask, agent_id)
            return
        ended, reader = self._ended.find(ask.transfer_id)
        if ended is None and ask.is_early and self._early.ask(agent_id, ask, time.monotonic()):
            return
        if isinstance(ask, Claim) and isinstance(ended, GrantReleasedError) and reader == engine_of(agent_id, ask.rank):
            self._send(agent_id, Claimed(ask.transfer_id, "", ""))  # its first rank was quicker, and has what it needs
            return
        self._send(agent_id, refusal(ask, ended or GrantUnknownError("this engine has no such prompt")))

    def _join(self, hold: Hold, ask: Question, agent_id: str) -> None:
        if not hold.is_reader(engine_of(agent_id, ask.rank), self._rank):
            self._send(agent_id, refusal(ask, another()))
            return
        if isinstance(ask, Claim):
            self._send(agent_id, Claimed(ask.transfer_id, "", ""))
            return
        known = hold.readers.get(ask.rank)
        if known is not None and known.ask.attempt >= ask.attempt:
            return
        if ask.rank in hold.released:
            self._send(agent_id, refusal(ask, GrantReleasedError("it was taken for gone, or gave this back")))
            return
        hold.hear(agent_id, time.monotonic())
        hold.readers_expected = max(1, ask.readers)
        hold.readers[ask.rank] = Reader(agent_id, ask, ask.first, ask.attempt * PARTS_MAX)
        self._tell_read(hold)
        self._catch_up(hold, hold.readers[ask.rank])

    def _give_back(self, hold: Hold, agent_id: str, release: Release) -> None:
        """An engine wants nothing (more) of it. That ends it only where it is the reader, or no other may be."""
        hold.forget(agent_id)
        engine = engine_of(agent_id, release.rank)
        hold.find_reader(self._rank)
        if not hold.is_wanted_beside(engine) and hold.is_reader(engine, self._rank):
            self._release(hold, release)

    def _release(self, hold: Hold, release: Release) -> None:
        hold.readers_expected = max(1, release.readers)
        hold.released.add(release.rank)
        hold.readers.pop(release.rank, None)
        if hold.is_released and hold.until_s is not None:
            self._free(hold, GrantReleasedError("the reader gave it back"))

    def _reader_gone(self, hold: Hold, why: str) -> None:
        log.warning("the reader of a prompt %s", why, extra={"request_id": hold.request_id})
        if hold.until_s is not None:
            self._free(hold, PeerGoneError(f"the reader {why}"))
            return
        self._revoke(hold, _ELSEWHERE)
        hold.readers.clear()
        hold.readers_expected = max(1, hold.readers_expected)
        hold.released = set(range(hold.readers_expected))
        hold.heard_s.clear()

    # --- under the lock, from either thread ---

    def _catch_up(self, hold: Hold, reader: Reader) -> None:
        """Grant what is final and was not granted to this reader yet."""
        if reader.sent < hold.final:
            parts = self._grant_part(hold, reader, reader.sent, hold.final - reader.sent)
            announce(parts, len(self._pages.layers))

    def _settle(self, written: Sequence[tuple[Hold, int]]) -> None:
        """So many blocks of these holds are written."""
        with self._lock:
            for hold, final in written:
                if self._holds.get(hold.request_id) is hold:
                    hold.final = max(hold.final, final)
                    for reader in hold.readers.values():
                        self._catch_up(hold, reader)

    def _grant_part(self, hold: Hold, reader: Reader, first: int, count: int) -> list[PartGrant]:
        reader.parts += 1
        blocks = hold.blocks[first : first + count]
        granted = self._grant(hold, reader.agent_id, reader.ask.rank, reader.parts, blocks)
        if not granted:
            error = GrantRevokedError("the source could not grant the blocks")
            self._send(reader.agent_id, refusal(reader.ask, error))
            return []
        reader.sent = first + count
        self._send(reader.agent_id, Part(hold.transfer_id, reader.parts, first, count, hold.total))
        return granted

    def _grant(
        self, hold: Hold, reader: str | None, reader_rank: int, part: int, blocks: Sequence[int]
    ) -> list[PartGrant]:
        ended = functools.partial(self._grant_ended, hold, reader_rank)
        return self._granting.grant(hold, reader, reader_rank, part, blocks, ended)

    def _grant_ended(self, hold: Hold, reader_rank: int, grant: Grant, state: GrantState) -> None:
        with self._lock:
            hold.grants.pop(grant.transfer_id, None)
            if (
                state not in (GrantState.RELEASED, GrantState.READER_GONE)
                or self._holds.get(hold.request_id) is not hold
            ):
                return
            bound = grant.bound
            taker = None if bound is None else engine_of(bound, reader_rank)
            is_of_reader = taker is not None and taker == hold.find_reader(self._rank)
            if state is GrantState.READER_GONE and is_of_reader:
                self._reader_gone(hold, "is gone")
            elif state is GrantState.RELEASED and grant.transfer_id in hold.direct:
                hold.direct.discard(grant.transfer_id)
                hold.takers.add(taker or "")
                if not hold.direct and is_of_reader and len(hold.takers) == 1:  # else the reader asks for all of it
                    self._release(hold, Release(hold.transfer_id, self._rank, 1))

    def _free(self, hold: Hold, how: KvxferError) -> None:
        """Its blocks are vLLM's again. Only of a hold that vLLM has finished."""
        self._end(hold, how)
        self._on_freed(hold.request_id)

    def _end(self, hold: Hold, how: KvxferError) -> None:
        self._revoke(hold, str(how) if isinstance(how, GrantRevokedError) else _ELSEWHERE)
        self._holds.pop(hold.request_id, None)
        if self._by_transfer.get(hold.transfer_id) is hold:
            del self._by_transfer[hold.transfer_id]
        self._writing = [other for other in self._writing if other is not hold]
        hold.span.end(None if isinstance(how, GrantReleasedError) else how.code)
        self._ended.remember(hold.transfer_id, how, hold.find_reader(self._rank))
        for reader in hold.readers.values():
            self._send(reader.agent_id, refusal(reader.ask, how))

    def _revoke(self, hold: Hold, why: str) -> None:
        for grant in hold.grants.values():
            grant.revoke(why)
        hold.grants.clear()

    def _send(self, agent_id: str, message: Message) -> None:
        self._post(self._outbox.send, agent_id, encode(message))
