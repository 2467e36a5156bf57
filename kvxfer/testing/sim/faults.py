"""The faults by name, how often each one strikes in a seed, and in which phases of a transfer it can strike at all;
must never know how a fault is carried out.

Swarm testing: each seed switches whole kinds off and gives the others weights that differ by orders of magnitude, so
that rare combinations meet (a world where everything fails a little never lets one thing fail a lot).
"""

from __future__ import annotations

import dataclasses
import enum
import random


class TransferPhase(enum.StrEnum):
    """Where a transfer stood, at its destination, when a fault struck it."""

    CONNECTING = "connecting"
    WAITING = "waiting"
    READING = "reading"
    CONFIRMING = "confirming"
    FINAL = "final"


class Kind(enum.StrEnum):
    """What can go wrong. The first six strike one frame; the rest a link, a process, the coordinator, or are acts of
    owners at a bad moment.
    """

    DROP = "drop"
    DUPLICATE = "duplicate"
    DELAY = "delay"
    REORDER = "reorder"
    LOST_VERDICT = "lost verdict"
    LOST_RENEWAL = "lost renewal"
    CUT = "cut"
    PARTITION = "partition"
    ONE_WAY_PARTITION = "one-way partition"
    KILL_SOURCE = "kill source"
    KILL_DESTINATION = "kill destination"
    PAUSE_SOURCE = "pause source"
    PAUSE_DESTINATION = "pause destination"
    COORDINATOR_CUT = "coordinator cut"
    COORDINATOR_RESTART = "coordinator restart"
    REGRANT = "same id granted by next incarnation"
    PREEMPTION = "preemption after ready"
    OWNER_RELEASE = "owner releases"
    LATE_READER = "late reader"
    EXPIRED_GRANT = "expired grant"
    PULL_BEFORE_GRANT = "pull before grant"
    CANCEL = "cancel"
    DEADLINE = "deadline"
    SECOND_SOURCE = "retry on second source"
    SLOW_READ = "slow read"
    CORRUPTION = "corrupted payload"
    REGION_REMOVED = "region removed"
    MEMORY_GONE = "memory gone"
    GONE_THEN_LOST = "memory gone, then session lost"


FRAME_KINDS = (Kind.DROP, Kind.DUPLICATE, Kind.DELAY, Kind.REORDER, Kind.LOST_VERDICT, Kind.LOST_RENEWAL)
TIMED_KINDS = (
    Kind.CUT,
    Kind.PARTITION,
    Kind.ONE_WAY_PARTITION,
    Kind.KILL_SOURCE,
    Kind.KILL_DESTINATION,
    Kind.PAUSE_SOURCE,
    Kind.PAUSE_DESTINATION,
    Kind.COORDINATOR_CUT,
    Kind.COORDINATOR_RESTART,
    Kind.PREEMPTION,
    Kind.OWNER_RELEASE,
    Kind.CANCEL,
    Kind.REGION_REMOVED,
)
REQUEST_KINDS = (
    Kind.LATE_READER,
    Kind.DEADLINE,
    Kind.SECOND_SOURCE,
    Kind.SLOW_READ,
    Kind.EXPIRED_GRANT,
    Kind.CORRUPTION,
    Kind.MEMORY_GONE,
    Kind.GONE_THEN_LOST,
)

IMPOSSIBLE: dict[tuple[Kind, TransferPhase], str] = {
    (Kind.LOST_RENEWAL, TransferPhase.CONNECTING): "a reader without a session sends no renewal",
    (
        Kind.LOST_RENEWAL,
        TransferPhase.FINAL,
    ): "a final transfer renews nothing; one that ends in this act is not counted",
    (Kind.LATE_READER, TransferPhase.READING): "it is the posting that is late, and nothing is read then",
    (Kind.LATE_READER, TransferPhase.CONFIRMING): "it is the posting that is late, and nothing is read then",
    (Kind.LATE_READER, TransferPhase.FINAL): "it is the posting that is late, and a pull is not posted final",
    (Kind.PULL_BEFORE_GRANT, TransferPhase.READING): "nothing is read before the grant",
    (Kind.PULL_BEFORE_GRANT, TransferPhase.CONFIRMING): "nothing is read before the grant",
    (Kind.DEADLINE, TransferPhase.FINAL): "a deadline ends only what is not final",
    (Kind.SECOND_SOURCE, TransferPhase.CONNECTING): "the first transfer is final before the second begins",
    (Kind.SECOND_SOURCE, TransferPhase.WAITING): "the first transfer is final before the second begins",
    (Kind.SECOND_SOURCE, TransferPhase.READING): "the first transfer is final before the second begins",
    (Kind.SECOND_SOURCE, TransferPhase.CONFIRMING): "the first transfer is final before the second begins",
    (Kind.SLOW_READ, TransferPhase.CONNECTING): "a read needs a session to begin",
    (Kind.SLOW_READ, TransferPhase.WAITING): "a read begins by leaving this phase",
    (Kind.SLOW_READ, TransferPhase.CONFIRMING): "every read is over",
    (Kind.SLOW_READ, TransferPhase.FINAL): "no read begins in a final transfer",
    (Kind.CORRUPTION, TransferPhase.WAITING): "it is counted where it lands, and nothing lands before the reading",
    (Kind.CORRUPTION, TransferPhase.CONFIRMING): "it is counted where it lands, and everything has",
    (
        Kind.MEMORY_GONE,
        TransferPhase.CONFIRMING,
    ): "every read is over; a last block that is sent again is not counted",
    (Kind.GONE_THEN_LOST, TransferPhase.CONNECTING): "it is counted where the lane that sends has sent",
    (Kind.GONE_THEN_LOST, TransferPhase.WAITING): "it is counted where the lane that sends has sent",
    (Kind.GONE_THEN_LOST, TransferPhase.FINAL): "it is counted where the lane that sends has sent",
}
"""Cells that must stay empty, each with its reason."""


@dataclasses.dataclass(frozen=True)
class FaultWeights:
    """How often each kind strikes in one seed: chances for frame and request kinds, strikes a second for timed ones."""

    of: dict[Kind, float]

    def __getitem__(self, kind: Kind) -> float:
        return self.of.get(kind, 0.0)

    @classmethod
    def none(cls) -> FaultWeights:
        return cls({})

    @classmethod
    def swarm(cls, rng: random.Random) -> FaultWeights:
        """Half of the kinds off, the rest anywhere between rare and constant."""
        of: dict[Kind, float] = {}
        groups = (
            (FRAME_KINDS, 0.003, 0.3),
            (TIMED_KINDS, 0.05, 2.0),
            (REQUEST_KINDS, 0.05, 0.7),
            ((Kind.REGRANT,), 0.5, 1.0),
        )
        for kinds, low, high in groups:
            for kind in kinds:
                weight = low * (high / low) ** rng.random()
                if rng.random() < 0.5:
                    of[kind] = weight
        return cls(of)
