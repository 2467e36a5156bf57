"""The judge of a simulated world: a reference model of grants, reservations and true times. It decides which invariant
of the design a run broke; it must share no code with what it judges.

The world tells it what happened (``pulled``, ``landed``, ``grant_ended``, ...) and the true moment of each event. It
never asks a machine. Incarnations are named by their index in the world, transfers by (incarnation of the destination,
transfer id), grants by (incarnation of the source, transfer id).
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from kvxfer.testing.sim.tagged_memory import TaggedMemory, describe
from kvxfer.testing.sim.virtual_clock import NEVER, S


class Invariant(enum.IntEnum):
    """The rules that no run may break (docs/simulation.md has them in full)."""

    RESERVATION = 1
    """A byte lands in a block only under a reservation that its agent still holds."""
    CONFIRMED = 2
    """A commit has the announced bytes, and the source confirmed its grant after the last byte was read."""
    ONCE = 3
    """A grant or a transfer begins once, ends once and drains once."""
    FINAL = 4
    """After the last fault everything ends within a bound, and nothing is left."""
    REPLAY = 5
    """One seed gives one history."""
    NOTIFICATION = 6
    """A notification arrives once and in order, and is called delivered only if it arrived."""
    WAITING = 7
    """Every circle of waits is broken by a named act within a bound."""


class Violation(AssertionError):
    """An invariant was broken."""

    def __init__(self, invariant: Invariant, text: str) -> None:
        super().__init__(f"invariant {invariant.value} ({invariant.name.lower()}): {text}")
        self.invariant = invariant


GrantKey = tuple[int, bytes]
TransferKey = tuple[int, bytes]


@dataclasses.dataclass
class _Grant:
    blocks: list[int]
    expiry: int
    lifetime_end: int
    ttl_max: int
    renewals: set[tuple[Any, int]] = dataclasses.field(default_factory=set)
    announced: list[bytes] = dataclasses.field(default_factory=list)
    ended_at: int = NEVER
    ended_as: str = ""
    ok_at: dict[int, int] = dataclasses.field(default_factory=dict)
    """When each nonce was first answered with ok."""

    def end(self) -> int:
        """The moment from which the owner may have overwritten the blocks: it ended the grant, or the grant expired."""
        return min(self.ended_at, self.expiry)


@dataclasses.dataclass
class _Transfer:
    source: int
    blocks: list[int]
    first: int
    memory: TaggedMemory
    posted_at: int
    must_check: bool
    landed: dict[int, tuple[bytes, int, int]] = dataclasses.field(default_factory=dict)
    """By own block: what, sampled when, from which incarnation."""
    heard_ok: list[int] = dataclasses.field(default_factory=list)
    """Nonces of the verdicts ok that arrived."""
    final: str = ""
    final_at: int = NEVER
    is_drained: bool = False


class Checkers:
    """The reference model of one run. Every method raises :class:`Violation` the moment an invariant is broken."""

    def __init__(self) -> None:
        self._grants: dict[GrantKey, _Grant] = {}
        self._transfers: dict[TransferKey, _Transfer] = {}
        self._reserved: dict[tuple[int, int], bytes] = {}
        self._sent: dict[tuple[int, int, int], bytes] = {}
        self._received: dict[tuple[int, int], int] = {}
        self._settled: set[tuple[int, int, int]] = set()
        self._numbers: dict[tuple[int, int], int] = {}

    # --- the source ---

    def granted(
        self, incarnation: int, id_: bytes, blocks: list[int], now: int, *, ttl: int, ttl_max: int, lifetime_max: int
    ) -> None:
        if (incarnation, id_) in self._grants:
            raise Violation(Invariant.ONCE, f"incarnation {incarnation} granted {id_.hex()} twice")
        self._grants[incarnation, id_] = _Grant(blocks, now + ttl, now + lifetime_max, ttl_max)

    def has_live_grant(self, incarnation: int, id_: bytes) -> bool:
        grant = self._grants.get((incarnation, id_))
        return grant is not None and not grant.ended_as

    def announced(self, incarnation: int, id_: bytes, blocks: list[bytes]) -> None:
        """The first ``len(blocks)`` blocks are ready and hold this."""
        grant = self._grants[incarnation, id_]
        if blocks[: len(grant.announced)] != grant.announced:
            raise Violation(
                Invariant.CONFIRMED, f"incarnation {incarnation} changed a block of {id_.hex()} after it was announced"
            )
        grant.announced = blocks

    def renewed(self, incarnation: int, id_: bytes, reader: Any, seq: int, ttl: int, now: int) -> None:
        """A renewal reached the source. Only the machine's grant table knows which reader is bound, so the model counts
        a renewal of any reader."""
        grant = self._grants.get((incarnation, id_))
        if grant is None or now >= grant.end() or (reader, seq) in grant.renewals:
            return
        grant.renewals.add((reader, seq))
        grant.expiry = max(grant.expiry, min(now + min(ttl, grant.ttl_max), grant.lifetime_end))

    def grant_ended(self, incarnation: int, id_: bytes, state: str, now: int) -> None:
        grant = self._grants[incarnation, id_]
        if grant.ended_as:
            raise Violation(
                Invariant.ONCE,
                f"grant {id_.hex()} of incarnation {incarnation} ended as {grant.ended_as}, then as {state}",
            )
        if state == "ALIVE":
            raise Violation(Invariant.ONCE, f"grant {id_.hex()} of incarnation {incarnation} ended alive")
        grant.ended_as, grant.ended_at = state, now

    def freed(self, incarnation: int, id_: bytes) -> None:
        """The owner is about to overwrite this grant's blocks."""
        if not self._grants[incarnation, id_].ended_as:
            raise Violation(
                Invariant.CONFIRMED,
                f"the owner freed blocks of the live grant {id_.hex()} of incarnation {incarnation}",
            )

    def confirmed(self, incarnation: int, id_: bytes, nonce: int, now: int) -> None:
        """The source said ok to ``nonce``: true now, or a repeat of what was true when it was first said."""
        grant = self._grants.get((incarnation, id_))
        if grant is None:
            raise Violation(
                Invariant.CONFIRMED, f"incarnation {incarnation} confirmed {id_.hex()}, which it never granted"
            )
        if nonce in grant.ok_at:
            return
        if now >= grant.end():
            raise Violation(
                Invariant.CONFIRMED,
                f"incarnation {incarnation} confirmed {id_.hex()} at {now / S:.6f} s; it was over "
                f"({grant.ended_as or 'past its expiry'}) since {grant.end() / S:.6f} s",
            )
        grant.ok_at[nonce] = now

    # --- the destination ---

    def pulled(
        self,
        incarnation: int,
        id_: bytes,
        source: int,
        blocks: list[int],
        first: int,
        memory: TaggedMemory,
        now: int,
        *,
        must_check: bool,
    ) -> None:
        """``must_check``: into a pool with checksums."""
        for block in blocks:
            if (incarnation, block) in self._reserved:
                raise Violation(Invariant.RESERVATION, f"block {block} of incarnation {incarnation} is reserved twice")
            self._reserved[incarnation, block] = id_
        self._transfers[incarnation, id_] = _Transfer(source, blocks, first, memory, now, must_check)

    def reserved(self, incarnation: int, id_: bytes, blocks: list[int], first: int) -> None:
        """A pull that had no blocks was given these."""
        for block in blocks:
            if (incarnation, block) in self._reserved:
                raise Violation(Invariant.RESERVATION, f"block {block} of incarnation {incarnation} is reserved twice")
            self._reserved[incarnation, block] = id_
        transfer = self._transfers[incarnation, id_]
        transfer.blocks, transfer.first = blocks, first

    def unreserved(self, incarnation: int, id_: bytes) -> None:
        """The owner took the blocks of a pull back: from now on nothing may land there for it."""
        transfer = self._transfers[incarnation, id_]
        if transfer.landed:
            raise Violation(Invariant.RESERVATION, f"blocks of {id_.hex()} were taken back after bytes had landed")
        for block in transfer.blocks:
            del self._reserved[incarnation, block]
        transfer.blocks = []

    def written(self, incarnation: int, block: int) -> None:
        """The owner writes to a block: no live grant may promise its bytes, and nothing may land there."""
        if (incarnation, block) in self._reserved:
            holder = self._reserved[incarnation, block].hex()
            raise Violation(
                Invariant.RESERVATION,
                f"incarnation {incarnation} writes to block {block}, which {holder} is pulled into",
            )
        for (owner, id_), grant in self._grants.items():
            if owner == incarnation and not grant.ended_as and block in grant.blocks[: len(grant.announced)]:
                raise Violation(
                    Invariant.CONFIRMED,
                    f"incarnation {incarnation} writes to block {block}, announced for the live {id_.hex()}",
                )

    def landed(
        self,
        incarnation: int,
        id_: bytes,
        block: int,
        data: bytes,
        *,
        sampled_at: int,
        sampled_from: int,
        is_checked: bool,
    ) -> None:
        """Bytes of transfer ``id_`` reached ``block``; they were read from the source's memory at ``sampled_at``.
        ``is_checked``: the source sent the checksum that they must have."""
        holder = self._reserved.get((incarnation, block))
        if holder != id_:
            raise Violation(
                Invariant.RESERVATION,
                f"{describe(data)} landed in block {block} of incarnation {incarnation} for {id_.hex()}, "
                + (f"but the block is reserved for {holder.hex()}" if holder else "but the block is the owner's"),
            )
        if self._transfers[incarnation, id_].must_check and not is_checked:
            raise Violation(
                Invariant.CONFIRMED,
                f"{describe(data)} landed unchecked for {id_.hex()} in a checksummed pool of incarnation {incarnation}",
            )
        self._transfers[incarnation, id_].landed[block] = (data, sampled_at, sampled_from)

    def final(self, incarnation: int, id_: bytes, state: str, now: int) -> None:
        transfer = self._transfers[incarnation, id_]
        if transfer.final:
            raise Violation(Invariant.ONCE, f"transfer {id_.hex()} became {transfer.final}, then {state}")
        transfer.final, transfer.final_at = state, now
        if state == "COMMITTED":
            self._check_commit(incarnation, id_, transfer)

    def _check_commit(self, incarnation: int, id_: bytes, transfer: _Transfer) -> None:
        def wrong(text: str) -> Violation:
            return Violation(
                Invariant.CONFIRMED, f"transfer {id_.hex()} of incarnation {incarnation} committed, but {text}"
            )

        grant = self._grants.get((transfer.source, id_))
        if grant is None:
            raise wrong(f"its source, incarnation {transfer.source}, never granted it")
        last = 0
        for index, block in enumerate(transfer.blocks):
            position = transfer.first + index
            if block not in transfer.landed:
                raise wrong(f"nothing landed for position {position}")
            data, sampled_at, sampled_from = transfer.landed[block]
            if position >= len(grant.announced):
                raise wrong(f"position {position} was never announced")
            if sampled_from != transfer.source:
                raise wrong(f"position {position} was read from incarnation {sampled_from}, not {transfer.source}")
            for what, found in (("landed", data), ("is in memory", transfer.memory.blocks[block])):
                if found != grant.announced[position]:
                    raise wrong(
                        f"position {position}: {describe(grant.announced[position])} was announced, "
                        f"{describe(found)} {what}"
                    )
            last = max(last, sampled_at)
        moments = [grant.ok_at[nonce] for nonce in transfer.heard_ok]
        if not any(moment >= last for moment in moments):
            said = f"the last word that came was of {max(moments) / S:.6f} s" if moments else "no word came"
            raise wrong(f"its last byte was read at {last / S:.6f} s and {said}")

    def verdict_arrived(self, incarnation: int, id_: bytes, source: int, nonce: int) -> None:
        """An ok of ``source`` reached the destination; its machines may still find it stale."""
        transfer = self._transfers.get((incarnation, id_))
        if transfer is not None and transfer.source == source:
            transfer.heard_ok.append(nonce)

    def drained(self, incarnation: int, id_: bytes) -> None:
        transfer = self._transfers[incarnation, id_]
        if not transfer.final:
            raise Violation(Invariant.ONCE, f"transfer {id_.hex()} drained before it was final")
        if transfer.is_drained:
            raise Violation(Invariant.ONCE, f"transfer {id_.hex()} drained twice")
        transfer.is_drained = True
        for block in transfer.blocks:
            del self._reserved[incarnation, block]

    def reused(self, incarnation: int, block: int, expected: bytes, found: bytes) -> None:
        """The owner looks again at a block that it wrote, or that was committed to it."""
        if found != expected:
            raise Violation(
                Invariant.RESERVATION,
                f"block {block} of incarnation {incarnation} held {describe(expected)} and holds {describe(found)}, "
                "with no act of its owner",
            )

    def counted(self, incarnation: int, held: int, granted: int) -> None:
        """What an incarnation's ledger counts: blocks reserved or quarantined, and blocks under a grant."""
        known = sum(owner == incarnation for owner, _ in self._reserved)
        if held != known:
            raise Violation(
                Invariant.RESERVATION, f"the ledger of incarnation {incarnation} holds {held} blocks, the model {known}"
            )
        known = len(
            {
                b
                for (owner, _), grant in self._grants.items()
                if owner == incarnation and not grant.ended_as
                for b in grant.blocks
            }
        )
        if granted != known:
            raise Violation(
                Invariant.CONFIRMED,
                f"the ledger of incarnation {incarnation} counts {granted} granted blocks, the model {known}",
            )

    # --- notifications ---

    def notified(self, sender: int, receiver: int, seq: int, payload: bytes) -> None:
        if (sender, receiver, seq) in self._sent:
            raise Violation(Invariant.NOTIFICATION, f"incarnation {sender} gave the number {seq} to {receiver} twice")
        self._sent[sender, receiver, seq] = payload
        self._numbers[sender, receiver] = seq

    def notified_next(self, sender: int, receiver: int, payload: bytes) -> None:
        """A message that the sender's endpoint posted by itself: it has the next number."""
        self.notified(sender, receiver, self._numbers.get((sender, receiver), 0) + 1, payload)

    def notification_received(self, sender: int, receiver: int, seq: int, payload: bytes) -> None:
        last = self._received.get((sender, receiver), 0)
        if seq <= last:
            raise Violation(Invariant.NOTIFICATION, f"number {seq} from {sender} came to {receiver} after {last}")
        if self._sent.get((sender, receiver, seq)) != payload:
            raise Violation(Invariant.NOTIFICATION, f"number {seq} from {sender} to {receiver} has another's payload")
        for skipped in range(last + 1, seq):
            if (sender, receiver, skipped) not in self._settled:
                raise Violation(Invariant.NOTIFICATION, f"number {skipped} from {sender} to {receiver} was left out")
        self._received[sender, receiver] = seq

    def notification_settled(self, sender: int, receiver: int, seq: int, *, is_delivered: bool) -> None:
        if (sender, receiver, seq) in self._settled:
            raise Violation(Invariant.NOTIFICATION, f"number {seq} from {sender} to {receiver} was settled twice")
        self._settled.add((sender, receiver, seq))
        if is_delivered and self._received.get((sender, receiver), 0) < seq:
            raise Violation(
                Invariant.NOTIFICATION, f"number {seq} from {sender} to {receiver} is called delivered; it is not"
            )

    # --- the end ---

    def check_rest(self, living: set[int], bound_ns: int, now: int) -> None:
        """Long after the last fault: for incarnations that still run, everything must be final, drained and ended."""
        for (incarnation, id_), transfer in self._transfers.items():
            if incarnation in living and not transfer.is_drained:
                raise Violation(
                    Invariant.FINAL,
                    f"transfer {id_.hex()} of incarnation {incarnation}, posted at {transfer.posted_at / S:.3f} s, is "
                    f"{'not drained' if transfer.final else 'not final'} at {now / S:.3f} s, "
                    f"{bound_ns / S:.1f} s after the last fault",
                )
        for (incarnation, id_), grant in self._grants.items():
            if incarnation in living and not grant.ended_as:
                raise Violation(Invariant.FINAL, f"grant {id_.hex()} of incarnation {incarnation} never ended")
        for sender, receiver, seq in self._sent:
            if sender in living and (sender, receiver, seq) not in self._settled:
                raise Violation(
                    Invariant.NOTIFICATION, f"number {seq} from {sender} to {receiver} is neither delivered nor failed"
                )

    def is_at_rest(self, living: set[int]) -> bool:
        return (
            all(transfer.is_drained for (incarnation, _), transfer in self._transfers.items() if incarnation in living)
            and all(grant.ended_as for (incarnation, _), grant in self._grants.items() if incarnation in living)
            and all(key in self._settled for key in self._sent if key[0] in living)
        )

    def last_final_ns(self) -> int:
        return max((t.final_at for t in self._transfers.values() if t.final), default=0)
