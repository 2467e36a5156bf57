"""Faults on command: which request gets which fault, and how often.

Decides by path, leg, count and chance alone. It must never know a socket: ``responder`` performs what is chosen here.
"""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Mapping
from typing import Any

from kvxfer.mock_engine.legs import LegPart
from kvxfer.openai.errors import RequestError

FAULTS_MAX = 256
FILLER_BYTES_MAX = 64 << 20


class FaultKind(enum.StrEnum):
    """What goes wrong."""

    STATUS = "status"
    """The answer is an error: ``status``, ``message``, ``headers``."""
    LATE = "late"
    """The request is taken up only after ``delay_s``."""
    HANG = "hang"
    """No byte of an answer comes, for ``delay_s`` or, if that is 0, ever."""
    STALL = "stall"
    """After ``after_tokens`` nothing comes any more, for ``delay_s`` or, if that is 0, ever."""
    CUT = "cut"
    """After ``after_tokens`` the connection is closed, or reset with ``reset``."""
    HALF = "half"
    """After ``after_tokens`` half of a chunk is sent, and the connection closed."""
    GARBAGE = "garbage"
    """Instead of the answer come bytes that are no HTTP; with ``after_tokens`` an event that is no JSON."""
    HEADERS = "headers"
    """The answer's head has ``bytes`` more bytes."""
    SLOW_READ = "slow_read"
    """The engine waits ``delay_s`` after each read of the request's body."""
    EXIT = "exit"
    """After ``after_tokens`` the process ends at once, with ``status`` as its exit code."""
    DOWN = "down"
    """The engine closes its port and every connection, for ``delay_s`` or, if that is 0, until ``up``."""
    LOAD = "load"
    """A decode engine cannot get the KV of the prompt."""
    KEEP = "keep"
    """A decode engine gets the KV, and the prefill engine is never told that it may free the blocks."""
    LIE = "lie"
    """The answer tells other numbers than the true ones: ``cached_tokens`` cached prompt tokens, or ``cached_factor``
    times the true ones, and ``time_factor`` times the true durations. What the engine does and counts stays true."""


@dataclasses.dataclass
class MockFault:
    """One fault. ``left`` counts down; None: for ever."""

    kind: FaultKind
    path: str = ""
    """The beginning of the paths that it is for; empty: every route that computes."""
    leg: LegPart | None = None
    left: int | None = None
    skip: int = 0
    """Requests that go well first."""
    probability: float = 1.0
    after_tokens: int = 0
    delay_s: float = 0.0
    status: int = 500
    message: str = "a fault on command"
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    bytes: int = 1 << 20
    reset: bool = False
    cached_tokens: int | None = None
    """Of a lie: cached prompt tokens of each answer, also more than its prompt has; None: ``cached_factor`` decides."""
    cached_factor: float = 1.0
    """Of a lie: so many times the true cached tokens."""
    time_factor: float = 1.0
    """Of a lie: so many times the true durations."""
    number: int = 0
    taken: int = 0

    def as_dict(self) -> dict[str, Any]:
        """As it is shown, and as :func:`read_fault` takes it."""
        shown = dataclasses.asdict(self)
        shown["fault"] = shown.pop("kind")
        shown["count"] = shown.pop("left")
        return shown


_CHECKS: dict[str, tuple[Any, float, float]] = {
    "count": (int, 1, 1 << 31),
    "skip": (int, 0, 1 << 31),
    "probability": ((int, float), 0, 1),
    "after_tokens": (int, 0, 1 << 31),
    "delay_s": ((int, float), 0, 1e6),
    "status": (int, 0, 999),
    "bytes": (int, 1, FILLER_BYTES_MAX),
    "cached_tokens": (int, 0, 1 << 31),
    "cached_factor": ((int, float), 0, 1e6),
    "time_factor": ((int, float), 0, 1e6),
}
_OF_A_LIE = ("cached_tokens", "cached_factor", "time_factor")
_STATUS_DEFAULT = {FaultKind.STATUS: 500, FaultKind.EXIT: 1}


def read_fault(value: Any) -> MockFault:
    """The fault that a JSON object describes. Raises RequestError that names the field."""
    if not isinstance(value, dict):
        raise RequestError("a fault must be an object")
    given = dict(value)
    kinds = {kind.value: kind for kind in FaultKind}
    kind = kinds.get(str(given.pop("fault", "")))
    if kind is None:
        raise RequestError(f"fault must be one of {', '.join(kinds)}", param="fault")
    made: dict[str, Any] = {"kind": kind, "status": _STATUS_DEFAULT.get(kind, 500)}
    for name, (types, least, most) in _CHECKS.items():
        one: Any = given.pop(name, None)
        if one is None:
            continue
        if isinstance(one, bool) or not isinstance(one, types) or not least <= one <= most:
            raise RequestError(f"{name} must be {least:g} to {most:g}", param=name)
        made["left" if name == "count" else name] = one
    for name in ("path", "message"):
        if name in given:
            made[name] = str(given.pop(name))
    made["reset"] = bool(given.pop("reset", False))
    if (leg := given.pop("leg", None)) is not None:
        if leg not in tuple(LegPart):
            raise RequestError(f"leg must be one of {', '.join(LegPart)}", param="leg")
        made["leg"] = LegPart(leg)
    headers = given.pop("headers", None) or {}
    if not isinstance(headers, dict) or any(set("\r\n") & set(f"{name}{text}") for name, text in headers.items()):
        raise RequestError("headers must be an object of texts without line breaks", param="headers")
    made["headers"] = {str(name): str(text) for name, text in headers.items()}
    for name in ("number", "taken"):
        given.pop(name, None)
    if given:
        raise RequestError(f"a fault has no field {next(iter(given))!r}", param=str(next(iter(given))))
    if kind is FaultKind.STATUS and not 400 <= made["status"] <= 599:
        raise RequestError("status must be 400 to 599", param="status")
    if kind is FaultKind.LIE and made.keys().isdisjoint(_OF_A_LIE):
        raise RequestError(f"a lie needs one of {', '.join(_OF_A_LIE)}", param="cached_tokens")
    return MockFault(**made)


class FaultTable:
    """The faults of one engine, oldest first. The first that fits a request is taken."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._faults: dict[int, MockFault] = {}
        self._number = 0
        self.taken: dict[str, int] = {}
        """How often each kind was taken, since the engine began."""

    def __len__(self) -> int:
        return len(self._faults)

    def __iter__(self) -> Any:
        return iter(list(self._faults.values()))

    def add(self, fault: MockFault) -> int:
        """Returns its number. Raises RequestError where there are too many."""
        if len(self._faults) >= FAULTS_MAX:
            raise RequestError(f"an engine has at most {FAULTS_MAX} faults")
        self._number += 1
        fault.number = self._number
        self._faults[fault.number] = fault
        return fault.number

    def remove(self, number: int | None = None) -> int:
        """Remove one, or all; returns how many there were."""
        numbers = list(self._faults) if number is None else [number]
        return sum(self._faults.pop(one, None) is not None for one in numbers)

    def take(
        self, path: str, leg: LegPart | None, *, computes: bool, kinds: frozenset[FaultKind] | None = None
    ) -> MockFault | None:
        """The fault for a request, if any. ``kinds`` limits the choice to those that can happen now."""
        for fault in list(self._faults.values()):
            if kinds is not None and fault.kind not in kinds:
                continue
            if not (path.startswith(fault.path) if fault.path else computes):
                continue
            if fault.leg is not None and fault.leg is not leg:
                continue
            if fault.skip:
                fault.skip -= 1
                continue
            if fault.probability < 1 and self._random.random() >= fault.probability:
                continue
            fault.taken += 1
            self.taken[fault.kind] = self.taken.get(fault.kind, 0) + 1
            if fault.left is not None:
                fault.left -= 1
                if not fault.left:
                    del self._faults[fault.number]
            return fault
        return None
