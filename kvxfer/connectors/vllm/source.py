"""Prompts that are computed here and wanted elsewhere: which engine is promised which of their blocks, until when.

A prompt has one reader: the engine that the request named, or the first that asks for it. What any other engine says of
it is answered with a refusal, and changes nothing. Each rank of this engine sees only the messages to itself: the first
rank decides which engine was first, and readers of the other ranks claim the prompt there.

A *pending send* is one prompt. While vLLM computes it the send is open, and each forward's blocks are granted as one
*part* to every rank that asked, announced layer by layer. Once vLLM has finished it, its blocks stay until all readers
have what they need, its time is over, or its reader is dead; then, once no grant over them is alive, the blocks are
given back. The bytes are safe without this: each is read under a grant that the native core judges.

The forward thread begins and announces steps; everything else happens on the agent's loop. One lock guards the table.
What is said to be written is said through ``after``: of a device's memory once the device has written it.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvxfer.agent import Agent, Grant, Pool
from kvxfer.connectors.common.ids import DIRECT, engine_of, rank_agent
from kvxfer.connectors.common.outbox import Outbox
from kvxfer.connectors.common.pauses import Pauses
from kvxfer.connectors.vllm.accepted import Accepted
from kvxfer.connectors.vllm.early import Early, Question, another, crowded, refusal, unknown
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.pages import Pages
from kvxfer.connectors.vllm.parts import Announcing, Granting, PartGrant, announce
from kvxfer.connectors.vllm.pending_send import Ended, PendingSend, SendReader
from kvxfer.connectors.vllm.stage import StageLayers
from kvxfer.connectors.vllm.steps import Close, ComputedBlocks, Finish, Open, Revoke, StepOrders
from kvxfer.connectors.vllm.stream_callbacks import Callback, at_once
from kvxfer.connectors.vllm.wire import (
    PARTS_MAX,
    Ask,
    Await,
    Begun,
    Claim,
    Claimed,
    Keep,
    Message,
    PartReady,
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
"""A reader that has sent a message repeats every half second that it is alive; silent for so long, it is gone."""

_ELSEWHERE = "the prompt's blocks go to others"


class PromptSource:
    """The pending sends of one rank."""

    def __init__(
        self,
        agent: Agent,
        pools: tuple[Pool, ...],
        pages: Pages,
        options: ConnectorOptions,
        rank: int,
        stage: StageLayers,
        call_soon: Callable[..., None],
        on_freed: Callable[[str], None],
        after: Callable[[Callback], None] = at_once,
    ) -> None:
        """``stage``: the layers of ``pages``. ``call_soon(function, *arguments)`` calls on the agent's loop.
        ``on_freed(request_id)``: its blocks returned to vLLM. ``after(callback)`` calls it once the memory's device has
        done what the forward thread asked of it."""
        self._agent = agent
        self._pages = pages
        self._options = options
        self._rank = rank
        self._stage = stage
        self._call_soon = call_soon
        self._on_freed = on_freed
        self._after = after
        self._lock = threading.RLock()
        self._sends: dict[str, PendingSend] = {}
        self._by_transfer: dict[TransferId, PendingSend] = {}
        self._accepted = Accepted(options.unknown_wait_s)
        self._early = Early(self._accepted)
        self._ended = Ended()
        self._writing: list[PendingSend] = []
        self._read: list[str] = []
        """Prompts whose reader has begun, for the scheduler half."""
        self._outbox = Outbox(agent)
        """On the loop."""
        self._pauses = Pauses(SWEEP_S)
        layers = len(pages.layers)
        self._granting = Granting(agent, pools, pages.stores, rank, stage, options.kv_lease_duration)
        self._announcing = Announcing(layers, options.announce_layers or max(1, layers // 8), after)
        self.expired = 0

    def __len__(self) -> int:
        return len(self._sends)

    def take_expired(self) -> int:
        """Prompts that no engine fetched in time, since the last call."""
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
        """Revoke what the coming forward overwrites, before this returns, and grant what it completes."""
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
            written = [(send, len(send.blocks)) for send in self._writing]
            self._writing = []
        if written:
            self._after(functools.partial(self._settle, written))

    def step_failed(self) -> None:
        """The forward failed: no grant covers what it should have written."""
        self._announcing.drop()
        with self._lock:
            for send in list(self._writing):
                self._end(send, GrantRevokedError("the forward that should have computed it failed"))

    def step_over(self) -> None:
        """The engine has come to the end of its step."""
        with self._lock:
            self._accepted.step_over()

    def _open(self, order: Open) -> None:
        send = PendingSend.of(order, order.total, time.monotonic() + self._options.kv_lease_max_s)
        self._admit(send)
        self._hear_early_releases(send)

    def _extend(self, order: ComputedBlocks) -> None:
        send = self._sends.get(order.request_id)
        if send is None:
            return
        for reader in send.readers.values():
            self._catch_up(send, reader)
        send.blocks += order.blocks
        self._writing.append(send)
        if not self._options.overlap:
            return
        for reader in send.readers.values():
            count = len(send.blocks) - reader.sent  # it may have the first of them in its cache
            if count > 0:
                self._announcing.add(self._grant_part(send, reader, reader.sent, count))

    def _finish(self, order: Finish) -> None:
        send = self._sends.get(order.request_id)
        now_s = time.monotonic()
        if send is None:
            send = PendingSend.of(order, len(order.blocks), now_s + self._options.kv_lease_max_s, order.blocks)
            self._admit(send)
        else:
            send.blocks = list(order.blocks)
            send.total = len(send.blocks)
        if not send.readers and not send.is_released:  # it may come with what the router was answered
            self._grant_directly(send)
        elif order.reader is None:  # another may wait for that already
            self._granting.abort(send.transfer_id, DIRECT)
        self._hear_early_releases(send)
        self._after(functools.partial(self._settle, [(send, send.total)]))
        send.until_s = now_s + self._options.kv_lease_duration
        if send.is_released:
            self._free(send, GrantReleasedError("the reader gave it back"))

    def _grant_directly(self, send: PendingSend) -> None:
        """Grant the whole prompt to its reader, or to the first that asks or already waits for it."""
        reader = None if send.reader is None else rank_agent(send.reader, self._rank)
        direct = self._grant(send, reader, self._rank, DIRECT, send.blocks, self._stage.layers)
        send.direct = {part.grant.transfer_id for part in direct}
        send.decisive = direct[0].grant if direct else None
        self._after(functools.partial(announce, direct, len(self._pages.layers)))

    def _close(self, order: Close) -> None:
        send = self._sends.get(order.request_id)
        error = from_code(order.code, order.reason)
        if send is not None:
            self._end(send, error)
            if order.will_resume and send.reader is not None:
                for rank in send.released:
                    release = Release(send.transfer_id, rank, send.readers_expected)
                    self._early.release(rank_agent(send.reader, rank), release, time.monotonic())
        if order.will_resume:
            self._ended.forget(order.transfer_id)
            self._accepted.accept_again(order.transfer_id)
            return
        self._ended.remember(order.transfer_id, error, None if send is None else send.reader)
        for agent_id, ask in self._early.take_asks(order.transfer_id):
            self._send(agent_id, refusal(ask, error))
        for agent_id in self._accepted.take(order.transfer_id):
            self._send(agent_id, Begun(order.transfer_id, error.code, str(error)))

    def _take_back(self, order: Revoke) -> None:
        send = self._sends.get(order.request_id)
        if send is not None and send.until_s is not None:
            self._free(send, GrantRevokedError(order.reason))

    def _admit(self, send: PendingSend) -> None:
        """Add a new send, with the questions for it that came early."""
        previous = self._by_transfer.get(send.transfer_id)
        if previous is not None:
            end = self._end if previous.until_s is None else self._free
            end(previous, GrantRevokedError("another request came with the same transfer id"))
        self._ended.forget(send.transfer_id)
        self._sends[send.request_id] = send
        self._by_transfer[send.transfer_id] = send
        for agent_id, ask in self._early.take_asks(send.transfer_id):
            self._join(send, ask, agent_id)
        for agent_id in self._accepted.take(send.transfer_id):
            self._awaited(agent_id, send.transfer_id)

    def _hear_early_releases(self, send: PendingSend) -> None:
        """Called after the questions: of two engines, the one that released the prompt is not the reader."""
        for agent_id, release in self._early.take_releases(send.transfer_id):
            self._give_back(send, agent_id, release)

    # --- the loop ---

    def on_message(self, agent_id: str, message: Message) -> None:
        """A message of a reader."""
        with self._lock:
            if isinstance(message, Keep):
                for transfer_id in message.transfer_ids:
                    send = self._by_transfer.get(transfer_id)
                    if send is not None:
                        send.hear(agent_id, time.monotonic())
            elif isinstance(message, Await):
                self._await(agent_id, message)
            elif isinstance(message, (Ask, Claim)):
                self._asked(agent_id, message)
            elif isinstance(message, Release):
                self._accepted.forget(agent_id, message.transfer_id)
                send = self._by_transfer.get(message.transfer_id)
                if send is not None:
                    self._give_back(send, agent_id, message)
                elif message.transfer_id not in self._ended:
                    self._early.release(agent_id, message, time.monotonic())

    def sweep(self) -> None:
        """End the sends whose time is over."""
        self._outbox.flush()
        now_s = time.monotonic()
        known = {member.ref.agent_id for member in self._agent.members()}
        with self._lock:
            paused_s = self._pauses.look(now_s)
            for send in list(self._sends.values()):
                send.put_off(paused_s)
                self._look_at(send, now_s, known)
            for agent_id, ask in self._early.expire(now_s):
                self._send(agent_id, refusal(ask, unknown()))
            for agent_id, transfer_id in self._accepted.sweep(now_s):
                self._send(agent_id, Begun(transfer_id, GrantUnknownError.code, str(unknown())))

    def _look_at(self, send: PendingSend, now_s: float, known: set[str]) -> None:
        self._tell_read(send)
        names = {reader.agent_id for reader in send.readers.values()} or set(filter(None, [send.reader]))
        if names and names <= known:
            send.was_reader_seen = True
        elif names and send.was_reader_seen:
            self._reader_gone(send, "is gone")
            return
        for name in [name for name, heard_s in send.heard_s.items() if now_s - heard_s >= SILENT_S]:
            del send.heard_s[name]
            if send.reader is not None:
                self._reader_gone(send, f"said nothing for {SILENT_S:g} s")
                return
        if send.until_s is None:
            return
        is_read = bool(send.heard_s) or any(grant.state is GrantState.ALIVE for grant in send.grants.values())
        if now_s >= (send.lease_end_s if is_read else send.until_s):
            self.expired += 1
            log.warning("a prompt was not fetched in time", extra={"request_id": send.request_id})
            self._free(send, GrantExpiredError("it was not fetched in time"))

    def arrival(self, transfer_id: TransferId, is_here: bool) -> None:
        """The API server has received that prompt, or has finished with it."""
        with self._lock:
            if not is_here:
                self._accepted.leave(transfer_id)
            elif transfer_id not in self._by_transfer and transfer_id not in self._ended:
                self._accepted.arrive(transfer_id, time.monotonic())

    def _tell_read(self, send: PendingSend) -> None:
        if not send.has_told_read and send.is_read:
            send.has_told_read = True
            self._read.append(send.request_id)

    def _await(self, agent_id: str, message: Await) -> None:
        now_s = time.monotonic()
        waiting = [one for one in message.transfer_ids if not self._awaited(agent_id, one)]
        kept = [one for one in waiting if self._accepted.ask(agent_id, one, now_s)]
        for transfer_id in set(waiting).difference(kept):
            self._send(agent_id, Begun(transfer_id, OverloadedError.code, str(crowded())))
        is_computing = any(send.until_s is None for send in self._sends.values())
        for answer in self._accepted.answer(kept, now_s, is_computing=is_computing):
            self._send(agent_id, answer)

    def _awaited(self, agent_id: str, transfer_id: TransferId) -> bool:
        """Tell that agent if a prompt that it awaits has begun, or never will. That does not make it the reader."""
        send = self._by_transfer.get(transfer_id)
        error: KvxferError | None = None
        if send is None:
            error, _ = self._ended.find(transfer_id)
            if error is None or transfer_id in self._accepted:
                return False
        elif send.find_reader(self._rank) not in (None, agent_id):
            error = another()
        self._send(agent_id, Begun(transfer_id, error.code if error else "", str(error) if error else ""))
        return True

    def _asked(self, agent_id: str, ask: Question) -> None:
        send = self._by_transfer.get(ask.transfer_id)
        if send is not None:
            self._join(send, ask, agent_id)
            return
        ended, reader = self._ended.find(ask.transfer_id)
        if ended is None and ask.is_early and self._early.ask(agent_id, ask, time.monotonic()):
            return
        if isinstance(ask, Claim) and isinstance(ended, GrantReleasedError) and reader == engine_of(agent_id, ask.rank):
            self._send(agent_id, Claimed(ask.transfer_id, "", ""))  # its first rank was quicker, and has what it needs
            return
        self._send(agent_id, refusal(ask, ended or GrantUnknownError("this engine has no such prompt")))

    def _join(self, send: PendingSend, ask: Question, agent_id: str) -> None:
        why: KvxferError | None = None if send.is_reader(engine_of(agent_id, ask.rank), self._rank) else another()
        if why is None and isinstance(ask, Ask):
            why = self._stage.why_not(ask.wanted)
        if why is not None:
            self._send(agent_id, refusal(ask, why))
            return
        if isinstance(ask, Claim):
            self._send(agent_id, Claimed(ask.transfer_id, "", ""))
            return
        known = send.readers.get(ask.rank)
        if known is not None and known.ask.attempt >= ask.attempt:
            return
        if ask.rank in send.released:
            self._send(agent_id, refusal(ask, GrantReleasedError("it was taken for gone, or gave this back")))
            return
        send.hear(agent_id, time.monotonic())
        send.readers_expected = max(1, ask.readers)
        send.readers[ask.rank] = SendReader(agent_id, ask, ask.first, ask.attempt * PARTS_MAX)
        self._tell_read(send)
        self._catch_up(send, send.readers[ask.rank])

    def _give_back(self, send: PendingSend, agent_id: str, release: Release) -> None:
        """An engine needs nothing more of it. That ends the send if the engine is the reader, or no other may be."""
        send.forget(agent_id)
        engine = engine_of(agent_id, release.rank)
        send.find_reader(self._rank)
        if not send.is_wanted_beside(engine) and send.is_reader(engine, self._rank):
            self._release(send, release)

    def _release(self, send: PendingSend, release: Release) -> None:
        send.readers_expected = max(1, release.readers)
        send.released.add(release.rank)
        send.readers.pop(release.rank, None)
        if send.is_released and send.until_s is not None:
            self._free(send, GrantReleasedError("the reader gave it back"))

    def _reader_gone(self, send: PendingSend, why: str) -> None:
        log.warning("the reader of a prompt %s", why, extra={"request_id": send.request_id})
        if send.until_s is not None:
            self._free(send, PeerGoneError(f"the reader {why}"))
            return
        self._revoke(send, _ELSEWHERE)
        send.readers.clear()
        send.readers_expected = max(1, send.readers_expected)
        send.released = set(range(send.readers_expected))
        send.heard_s.clear()

    # --- under the lock, from either thread ---

    def _catch_up(self, send: PendingSend, reader: SendReader) -> None:
        """Grant this reader the final blocks that it has no grant for."""
        if reader.sent < send.final:
            parts = self._grant_part(send, reader, reader.sent, send.final - reader.sent)
            announce(parts, len(self._pages.layers))

    def _settle(self, written: Sequence[tuple[PendingSend, int]]) -> None:
        """So many blocks of these sends are written."""
        with self._lock:
            for send, final in written:
                if self._sends.get(send.request_id) is send:
                    send.final = max(send.final, final)
                    for reader in send.readers.values():
                        self._catch_up(send, reader)

    def _grant_part(self, send: PendingSend, reader: SendReader, first: int, count: int) -> list[PartGrant]:
        reader.parts += 1
        blocks = send.blocks[first : first + count]
        granted = self._grant(send, reader.agent_id, reader.ask.rank, reader.parts, blocks, reader.ask.wanted)
        if not granted:
            error = GrantRevokedError("the source could not grant the blocks")
            self._send(reader.agent_id, refusal(reader.ask, error))
            return []
        reader.sent = first + count
        self._send(reader.agent_id, PartReady(send.transfer_id, reader.parts, first, count, send.total))
        return granted

    def _grant(
        self, send: PendingSend, reader: str | None, reader_rank: int, part: int, blocks: Sequence[int], layers: range
    ) -> list[PartGrant]:
        ended = functools.partial(self._grant_ended, send, reader_rank)
        return self._granting.grant(send, reader, reader_rank, part, blocks, layers, ended)

    def _grant_ended(self, send: PendingSend, reader_rank: int, grant: Grant, state: GrantState) -> None:
        with self._lock:
            send.grants.pop(grant.transfer_id, None)
            if (
                state not in (GrantState.RELEASED, GrantState.READER_GONE)
                or self._sends.get(send.request_id) is not send
            ):
                return
            bound = grant.bound
            taker = None if bound is None else engine_of(bound, reader_rank)
            is_of_reader = taker is not None and taker == send.find_reader(self._rank)
            if state is GrantState.READER_GONE and is_of_reader:
                self._reader_gone(send, "is gone")
            elif state is GrantState.RELEASED and grant.transfer_id in send.direct:
                send.direct.discard(grant.transfer_id)
                send.takers.add(taker or "")
                if not send.direct and is_of_reader and len(send.takers) == 1:  # else the reader asks for all of it
                    self._release(send, Release(send.transfer_id, self._rank, 1))

    def _free(self, send: PendingSend, how: KvxferError) -> None:
        """Return its blocks to vLLM. Only for a send that vLLM has finished."""
        self._end(send, how)
        self._on_freed(send.request_id)

    def _end(self, send: PendingSend, how: KvxferError) -> None:
        self._revoke(send, str(how) if isinstance(how, GrantRevokedError) else _ELSEWHERE)
        self._sends.pop(send.request_id, None)
        if self._by_transfer.get(send.transfer_id) is send:
            del self._by_transfer[send.transfer_id]
        self._writing = [other for other in self._writing if other is not send]
        send.span.end(None if isinstance(how, GrantReleasedError) else how.code)
        self._ended.remember(send.transfer_id, how, send.find_reader(self._rank))
        for reader in send.readers.values():
            self._send(reader.agent_id, refusal(reader.ask, how))

    def _revoke(self, send: PendingSend, why: str) -> None:
        for grant in send.grants.values():
            grant.revoke(why)
        send.grants.clear()

    def _send(self, agent_id: str, message: Message) -> None:
        self._call_soon(self._outbox.send, agent_id, encode(message))
