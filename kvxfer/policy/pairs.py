"""Which pairs of a prefill and a decode worker are ejected: those that fail while both ends work with others.

A transfer that fails has two ends and a wire. Where each end lately worked with another partner, what is between them
is to blame, and only the pair is ejected. Where one end fails with every partner that it has, and the other works with
another, that end is to blame: the failure then counts like one of that worker's own. Where neither can be told from the
other, nothing is ejected, and the caller's retry is the remedy.

An ejected pair is tried again by one request once its time is up: the pair is closed to others for as long again, or
until a verdict. Success brings it back, failure doubles the time.

Each call is one event and the time at which it happened. It must never know a clock, nor what a transfer is.
"""

from __future__ import annotations

import dataclasses
import enum
import math

from kvxfer.config import check_positive
from kvxfer.policy.backoff import Backoff
from kvxfer.policy.health import JITTER
from kvxfer.types import AgentRef

Pair = tuple[AgentRef, AgentRef]
"""Prefill worker, decode worker."""
NO_PAIRS: frozenset[Pair] = frozenset()


class PairVerdict(enum.StrEnum):
    """What a failure of a pair was put down to."""

    PAIR = "pair"
    PREFILL = "prefill"
    DECODE = "decode"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairOptions:
    """Raises ConfigError for a bad value."""

    failures_to_eject: int = 3
    eject_base_s: float = 1.0
    eject_cap_s: float = 30.0
    lately_s: float = 60.0
    """How long a success with another partner proves that an end works."""

    def __post_init__(self) -> None:
        check_positive("pair_failures_to_eject", self.failures_to_eject, maximum=1000)
        check_positive("pair_lately_s", self.lately_s, maximum=86400.0)
        _ = self.backoff

    @property
    def backoff(self) -> Backoff:
        return Backoff(base_s=self.eject_base_s, cap_s=self.eject_cap_s, jitter=JITTER)


class _PairRecord:
    __slots__ = ("delay_s", "due_s", "failed_s", "failures", "is_tried", "succeeded_s", "tries")

    def __init__(self) -> None:
        self.succeeded_s = self.failed_s = -math.inf
        self.failures = 0
        """In a row."""
        self.tries = 0
        """Ejections in a row; 0 where it is not ejected."""
        self.delay_s = self.due_s = 0.0
        self.is_tried = False
        """Whether a request is under way that tries it again."""


class PairTable:
    """All pairs of one router that had work. Ends that are gone are forgotten by ``forget``."""

    def __init__(self, options: PairOptions | None = None) -> None:
        self._options = options or PairOptions()
        self._backoff = self._options.backoff
        self._pairs: dict[Pair, _PairRecord] = {}
        self._partners: dict[AgentRef, set[AgentRef]] = {}
        self._ejected: set[Pair] = set()
        self.ejections: dict[Pair, int] = {}

    def __len__(self) -> int:
        return len(self._pairs)

    def ejected(self, now_s: float) -> frozenset[Pair]:
        """The pairs that get no request now."""
        if not self._ejected:
            return NO_PAIRS
        return frozenset(pair for pair in self._ejected if now_s < self._pairs[pair].due_s)

    def closed(self) -> dict[Pair, tuple[float, float]]:
        """Of every ejected pair: when it is tried again, and how long it is then closed to others."""
        return {pair: (self._pairs[pair].due_s, self._pairs[pair].delay_s) for pair in self._ejected}

    @property
    def ejected_count(self) -> int:
        return len(self._ejected)

    def started(self, prefill: AgentRef, decode: AgentRef, now_s: float) -> None:
        """A request goes to the pair. Where that is the one that tries an ejected pair again, no other does."""
        if self._ejected and (prefill, decode) in self._ejected:
            record = self._pairs[prefill, decode]
            if now_s >= record.due_s:
                record.due_s = now_s + record.delay_s
                record.is_tried = True

    def succeeded(self, prefill: AgentRef, decode: AgentRef, now_s: float) -> bool:
        """Returns whether the pair was ejected until now."""
        record = self._record(prefill, decode)
        record.succeeded_s = now_s
        record.failures = record.tries = 0
        record.is_tried = False
        was_ejected = (prefill, decode) in self._ejected
        self._ejected.discard((prefill, decode))
        return was_ejected

    def failed(self, prefill: AgentRef, decode: AgentRef, now_s: float, random: float) -> PairVerdict:
        """One request's transfer failed. PAIR is a failure that counts against the pair, and ejects it if there were
        enough in a row; PREFILL and DECODE are for the caller to count against that worker."""
        pair = (prefill, decode)
        record = self._record(prefill, decode)
        record.failed_s = now_s
        record.failures += 1
        if pair in self._ejected:
            if record.is_tried:  # else it was let in before the pair was ejected
                self._eject(pair, record, now_s, random)
            return PairVerdict.PAIR
        prefill_works = self._works_with_others(prefill, decode, now_s)
        decode_works = self._works_with_others(decode, prefill, now_s)
        if prefill_works and decode_works:
            if record.failures >= self._options.failures_to_eject:
                self._eject(pair, record, now_s, random)
            return PairVerdict.PAIR
        if decode_works and self._fails_with_others(prefill, decode, now_s):
            return PairVerdict.PREFILL
        if prefill_works and self._fails_with_others(decode, prefill, now_s):
            return PairVerdict.DECODE
        return PairVerdict.UNKNOWN

    def forget(self, worker: AgentRef) -> None:
        """That worker is gone."""
        for partner in self._partners.pop(worker, ()):
            for pair in ((worker, partner), (partner, worker)):
                self._pairs.pop(pair, None)
                self._ejected.discard(pair)
                self.ejections.pop(pair, None)
            others = self._partners.get(partner)
            if others is not None:
                others.discard(worker)
                if not others:
                    del self._partners[partner]

    def _record(self, prefill: AgentRef, decode: AgentRef) -> _PairRecord:
        record = self._pairs.get((prefill, decode))
        if record is None:
            record = self._pairs[prefill, decode] = _PairRecord()
            self._partners.setdefault(prefill, set()).add(decode)
            self._partners.setdefault(decode, set()).add(prefill)
        return record

    def _eject(self, pair: Pair, record: _PairRecord, now_s: float, random: float) -> None:
        record.tries += 1
        record.failures = 0
        record.is_tried = False
        record.delay_s = self._backoff.delay_s(record.tries, random=random)
        record.due_s = now_s + record.delay_s
        self._ejected.add(pair)
        self.ejections[pair] = self.ejections.get(pair, 0) + 1

    def _with_others(self, worker: AgentRef, partner: AgentRef) -> list[_PairRecord]:
        others = self._partners.get(worker, set()) - {partner}
        pairs = [pair for other in others for pair in ((worker, other), (other, worker))]
        return [self._pairs[pair] for pair in pairs if pair in self._pairs]

    def _works_with_others(self, worker: AgentRef, partner: AgentRef, now_s: float) -> bool:
        return any(
            record.succeeded_s > record.failed_s and now_s - record.succeeded_s <= self._options.lately_s
            for record in self._with_others(worker, partner)
        )

    def _fails_with_others(self, worker: AgentRef, partner: AgentRef, now_s: float) -> bool:
        return any(
            record.failed_s >= record.succeeded_s and now_s - record.failed_s <= self._options.lately_s
            for record in self._with_others(worker, partner)
        )

    def __repr__(self) -> str:
        return f"PairTable(pairs={len(self._pairs)}, ejected={len(self._ejected)})"
