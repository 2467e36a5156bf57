"""Which workers a router may give new work, by what its requests and probes met there.

::

                 refused, or enough failures in a row
          IN ------------------------------------------> OUT <--------------+
          ^                                              |  ^               |
          | slow_start_s passed          a probe passed, |  | a probe       | the one request failed,
          |                              once it was due |  | failed:       | or a probe did:
          |         the one request succeeded            v  | wait longer   | wait longer
     SLOW_START <----------------------------------- HALF_OPEN -------------+
          |                                                                 |
          +-----------------------------------------------------------------+
                 refused, or enough failures in a row: wait longer

- A refused connection puts a worker OUT at once. Answers that fail, and requests that hang, do so after
  ``failures_to_eject`` in a row with no success between. A probe that fails counts likewise, beside the requests: a
  probe that passes says nothing of requests that fail, and a request that succeeds ends both counts.
- A connection that broke before an answer began, or that did not come about in time, is only a doubt: the next probe
  is due at once. Where that is refused, the worker is OUT; where it fails otherwise, both count as failed probes; where
  it passes, nothing has happened. So a burst that fills a worker's queue of connections puts it nowhere.
- What a client did wrong, a worker that is full or too small, and a router without sockets never count.
- In HALF_OPEN one real request at a time is let in: a *trial*. Requests that were let in before the worker was OUT say
  nothing any more. Where all are OUT they are tried all the same, the least bad first (``share``), and such a request
  is a trial too.

Each call is one event and the time at which it happened; randomness comes in as a number. It must never know a clock,
a socket, or what a request asks for.
"""

from __future__ import annotations

import dataclasses
import enum

from kvxfer.config import check_positive
from kvxfer.errors import InvalidArgumentError
from kvxfer.policy.backoff import Backoff

JITTER = 0.2
SHARE_MIN = 0.1
"""Of what a worker at the beginning of its slow start would get otherwise."""
COUNTED_MAX = 4096


class HealthState(enum.StrEnum):
    IN = "in"
    OUT = "out"
    HALF_OPEN = "half_open"
    SLOW_START = "slow_start"


class HealthEvent(enum.StrEnum):
    SUCCEEDED = "succeeded"
    """A request that is no trial."""
    FAILED = "failed"
    TRIAL_SUCCEEDED = "trial_succeeded"
    TRIAL_FAILED = "trial_failed"
    REFUSED = "refused"
    """A request found no connection, trial or not."""
    DOUBTED = "doubted"
    PROBE_PASSED = "probe_passed"
    PROBE_FAILED = "probe_failed"
    PROBE_REFUSED = "probe_refused"


class Move(enum.Enum):
    """What an event does in a state."""

    NOTHING = enum.auto()
    CLEAR = enum.auto()
    """The failures in a row are over."""
    COUNT = enum.auto()
    """One failure more in a row; OUT if they are enough."""
    DOUBT = enum.auto()
    """A probe is due at once."""
    CLEAR_PROBES = enum.auto()
    COUNT_PROBE = enum.auto()
    """One failed probe more in a row, and one for a doubt; OUT if they are enough."""
    EJECT = enum.auto()
    OPEN = enum.auto()
    """HALF_OPEN, if the probe was due."""
    LONGER = enum.auto()
    """It stays OUT, and the next probe is due later."""
    WARM = enum.auto()
    """SLOW_START."""


_S, _E, _M = HealthState, HealthEvent, Move
_AT_WORK = {
    _E.SUCCEEDED: _M.CLEAR,
    _E.FAILED: _M.COUNT,
    _E.TRIAL_SUCCEEDED: _M.CLEAR,
    _E.TRIAL_FAILED: _M.COUNT,
    _E.REFUSED: _M.EJECT,
    _E.DOUBTED: _M.DOUBT,
    _E.PROBE_PASSED: _M.CLEAR_PROBES,
    _E.PROBE_FAILED: _M.COUNT_PROBE,
    _E.PROBE_REFUSED: _M.EJECT,
}
TABLE: dict[HealthState, dict[HealthEvent, Move]] = {
    _S.IN: _AT_WORK,
    _S.SLOW_START: _AT_WORK,
    _S.OUT: {
        _E.SUCCEEDED: _M.NOTHING,
        _E.FAILED: _M.NOTHING,
        _E.TRIAL_SUCCEEDED: _M.WARM,
        _E.TRIAL_FAILED: _M.NOTHING,
        _E.REFUSED: _M.NOTHING,
        _E.DOUBTED: _M.NOTHING,
        _E.PROBE_PASSED: _M.OPEN,
        _E.PROBE_FAILED: _M.LONGER,
        _E.PROBE_REFUSED: _M.LONGER,
    },
    _S.HALF_OPEN: {
        _E.SUCCEEDED: _M.NOTHING,
        _E.FAILED: _M.NOTHING,
        _E.TRIAL_SUCCEEDED: _M.WARM,
        _E.TRIAL_FAILED: _M.EJECT,
        _E.REFUSED: _M.EJECT,
        _E.DOUBTED: _M.DOUBT,
        _E.PROBE_PASSED: _M.NOTHING,
        _E.PROBE_FAILED: _M.EJECT,
        _E.PROBE_REFUSED: _M.EJECT,
    },
}
"""Every event in every state."""


class Blame(enum.Enum):
    """How a request's failure counts against its worker."""

    NEVER = enum.auto()
    DOUBT = enum.auto()
    IN_A_ROW = enum.auto()
    AT_ONCE = enum.auto()


BLAMES: dict[str, Blame] = {
    "unreachable": Blame.AT_ONCE,
    "lost": Blame.IN_A_ROW,
    "hung": Blame.IN_A_ROW,
    "error": Blame.IN_A_ROW,
    "malformed": Blame.IN_A_ROW,
    "transfer": Blame.IN_A_ROW,
    "unread": Blame.DOUBT,
    "connect_timeout": Blame.DOUBT,
    "silent": Blame.DOUBT,
    "overran": Blame.NEVER,
    "exhausted": Blame.NEVER,
    "gone": Blame.NEVER,
    "refused": Blame.NEVER,
    "does_not_fit": Blame.NEVER,
    "too_long": Blame.NEVER,
    "overloaded": Blame.NEVER,
}
"""By the kind of the failure: ``hung`` is a deadline that passed at the worker, ``error`` its 5xx, ``transfer`` what
``policy.pairs`` put down to it, ``refused`` its 4xx, ``too_long`` an answer beyond a bound of the router's,
``unread`` a connection that broke before an answer began, ``connect_timeout`` one that did not come about in time,
``silent`` a stream without a byte at a worker of which nothing else was heard lately (`policy.silence`),
``overran`` a request that took longer than it may as a whole, ``exhausted`` a router without sockets."""


def blame_of(kind: str) -> Blame:
    """Raises InvalidArgumentError for a kind of failure that is not known."""
    try:
        return BLAMES[kind]
    except KeyError:
        raise InvalidArgumentError(f"a failure is one of {', '.join(sorted(BLAMES))}, not {kind!r:.100}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HealthOptions:
    """When a worker is ejected and how it comes back. Raises ConfigError for a bad value."""

    failures_to_eject: int = 3
    eject_base_s: float = 0.25
    """The first probe of a worker that is OUT; each that fails doubles the wait."""
    eject_cap_s: float = 5.0
    slow_start_s: float = 10.0

    def __post_init__(self) -> None:
        check_positive("failures_to_eject", self.failures_to_eject, maximum=1000)
        check_positive("slow_start_s", self.slow_start_s, maximum=3600.0)
        check_positive("eject_cap_s", self.eject_cap_s, maximum=3600.0)
        _ = self.backoff

    @property
    def backoff(self) -> Backoff:
        return Backoff(base_s=self.eject_base_s, cap_s=self.eject_cap_s, jitter=JITTER)


@dataclasses.dataclass(frozen=True)
class HealthAccount:
    """All that another process must know to place requests as this one would. Times are of a clock that both have."""

    state: HealthState = HealthState.IN
    since_s: float = 0.0
    failures: int = 0
    probe_failures: int = 0
    tries: int = 0
    trials: int = 0
    is_doubted: bool = False
    ejected_for: str = ""
    ejections: int = 0


class WorkerHealth:
    """One worker's. ``ejected_for`` is why it was put OUT last; ``ejections`` counts how often it was."""

    __slots__ = (
        *("_backoff", "_doubted", "_due_s", "_failures", "_options", "_probe_failures", "_since_s", "_state"),
        *("_told_trials", "_trials", "_tries", "ejected_for", "ejections"),
    )

    def __init__(self, options: HealthOptions) -> None:
        self._options = options
        self._backoff = options.backoff
        self._state = HealthState.IN
        self._failures = 0
        self._probe_failures = 0
        self._tries = 0
        """Ejections and failed probes since it was IN last."""
        self._due_s = 0.0
        self._since_s = 0.0
        self._doubted = False
        self._trials: dict[str, int] = {}
        self._told_trials = 0
        self.ejected_for = ""
        self.ejections = 0

    # What a placement asks.

    @property
    def is_plain(self) -> bool:
        """Whether nothing is to be told of it, now or later: IN, without a failure or a doubt."""
        return (
            self._state is HealthState.IN
            and not self._failures
            and not self._probe_failures
            and not self._doubted
            and not self._trials
        )

    @property
    def is_steady(self) -> bool:
        """Whether ``is_closed`` and ``share`` do not change with time."""
        return self._state is HealthState.IN

    def state(self, now_s: float) -> HealthState:
        self._settle(now_s)
        return self._state

    def is_closed(self, now_s: float) -> bool:
        """Whether it gets a request only where no other worker is left."""
        self._settle(now_s)
        if self._state is HealthState.HALF_OPEN:
            return bool(self._trials) or self._told_trials > 0
        return self._state is HealthState.OUT

    def share(self, now_s: float) -> float:
        """Of the work that it would get if it were IN: 1, less in its slow start, and the less the worse where it is
        closed."""
        self._settle(now_s)
        if self._state is HealthState.SLOW_START:
            age = max(0.0, now_s - self._since_s) / self._options.slow_start_s
            return min(1.0, SHARE_MIN + (1.0 - SHARE_MIN) * age)
        if self._state is HealthState.OUT:
            return SHARE_MIN / (1 + self._tries)
        return 1.0

    # What a request tells.

    def begin(self, request_id: str, now_s: float) -> bool:
        """A request is sent to it. Returns whether that is a trial, which ``end`` must then be told of."""
        self._settle(now_s)
        if self._state is not HealthState.OUT and self._state is not HealthState.HALF_OPEN:
            return False
        self._trials[request_id] = self._trials.get(request_id, 0) + 1
        return True

    def end(self, request_id: str) -> None:
        """A trial is over, with or without a verdict."""
        left = self._trials.pop(request_id, 0) - 1
        if left > 0:
            self._trials[request_id] = left

    def succeeded(self, request_id: str, now_s: float, random: float) -> bool:
        """A request had an answer. Returns whether its state changed."""
        if self.is_plain:
            return False
        is_trial = request_id in self._trials
        return self.apply(HealthEvent.TRIAL_SUCCEEDED if is_trial else HealthEvent.SUCCEEDED, now_s, random)

    def failed(self, kind: str, request_id: str, now_s: float, random: float, *, is_counted: bool = False) -> bool:
        """A request failed. ``is_counted`` says that an earlier failure of the same request counted already, here or
        elsewhere. Returns whether its state changed."""
        blame = blame_of(kind)
        if blame is Blame.NEVER:
            return False
        is_trial = request_id in self._trials
        event = HealthEvent.TRIAL_FAILED if is_trial else HealthEvent.FAILED
        if blame is Blame.AT_ONCE:
            event = HealthEvent.REFUSED
        elif blame is Blame.DOUBT:
            event = HealthEvent.DOUBTED
        elif is_counted and not is_trial:
            return False
        return self.apply(event, now_s, random, reason=kind)

    def probed(self, event: HealthEvent, now_s: float, random: float) -> bool:
        """A probe passed, failed or was refused. Returns whether its state changed."""
        if event is HealthEvent.PROBE_PASSED and self.is_plain:
            return False
        return self.apply(event, now_s, random, reason=event.value)

    # What the prober asks.

    @property
    def probe_due_s(self) -> float | None:
        """When a probe is due beside the usual ones; None where the usual ones are enough."""
        if self._state is HealthState.OUT:
            return self._due_s
        return 0.0 if self._doubted else None

    @property
    def is_doubted(self) -> bool:
        """Whether requests met something there that a probe is to explain."""
        return self._doubted

    @property
    def failures_in_a_row(self) -> int:
        return self._failures

    # What processes tell each other.

    def account(self, now_s: float) -> HealthAccount:
        self._settle(now_s)
        return HealthAccount(
            self._state,
            self._since_s,
            self._failures,
            self._probe_failures,
            self._tries,
            sum(self._trials.values()),
            self._doubted,
            self.ejected_for,
            self.ejections,
        )

    def take(self, told: HealthAccount) -> None:
        """Be as another process says. The trials of this process stay its own, beside those that were told."""
        self._state = told.state
        self._since_s = told.since_s
        self._failures = told.failures
        self._probe_failures = told.probe_failures
        self._tries = told.tries
        self._told_trials = told.trials
        self._doubted = told.is_doubted
        self.ejected_for = told.ejected_for
        self.ejections = told.ejections

    # The machine.

    def apply(self, event: HealthEvent, now_s: float, random: float, *, reason: str = "") -> bool:
        """One event. Returns whether the state changed."""
        self._settle(now_s)
        before = self._state
        match TABLE[before][event]:
            case Move.NOTHING:
                pass
            case Move.CLEAR:
                self._failures = self._probe_failures = 0
                self._doubted = False
            case Move.COUNT:
                self._failures += 1
                if self._failures >= self._options.failures_to_eject:
                    self._eject(now_s, random, reason)
            case Move.DOUBT:
                self._doubted = True
            case Move.CLEAR_PROBES:
                self._probe_failures = 0
                self._doubted = False
            case Move.COUNT_PROBE:
                self._probe_failures += 1 + self._doubted
                self._doubted = False
                if self._probe_failures >= self._options.failures_to_eject:
                    self._eject(now_s, random, reason)
            case Move.EJECT:
                self._eject(now_s, random, reason)
            case Move.OPEN:
                if now_s >= self._due_s:
                    self._enter(HealthState.HALF_OPEN, now_s)
            case Move.LONGER:
                self._wait(now_s, random)
            case Move.WARM:
                self._trials.clear()
                self._enter(HealthState.SLOW_START, now_s)
        return self._state is not before

    def _settle(self, now_s: float) -> None:
        is_warming = self._state is HealthState.SLOW_START
        if is_warming and now_s - self._since_s >= self._options.slow_start_s:
            self._state = HealthState.IN
            self._tries = 0

    def _eject(self, now_s: float, random: float, reason: str) -> None:
        self.ejections += 1
        self.ejected_for = reason
        self._enter(HealthState.OUT, now_s)
        self._wait(now_s, random)

    def _wait(self, now_s: float, random: float) -> None:
        self._tries += 1
        self._due_s = now_s + self._backoff.delay_s(self._tries, random=random)

    def _enter(self, state: HealthState, now_s: float) -> None:
        self._state = state
        self._since_s = now_s
        self._failures = self._probe_failures = 0
        self._doubted = False

    def __repr__(self) -> str:
        return f"WorkerHealth({self._state.value}, failures={self._failures}, trials={len(self._trials)})"


class CountedRequests:
    """The requests whose failure counted already; the oldest of more than ``COUNTED_MAX`` is dropped."""

    def __init__(self, most: int = COUNTED_MAX) -> None:
        self._most = most
        self._ids: dict[str, None] = {}

    def add(self, request_id: str) -> bool:
        """Count a request. Returns whether it was counted before; one without an id never was."""
        if not request_id:
            return False
        if request_id in self._ids:
            return True
        self._ids[request_id] = None
        if len(self._ids) > self._most:
            del self._ids[next(iter(self._ids))]
        return False

    def __len__(self) -> int:
        return len(self._ids)
