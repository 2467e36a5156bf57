"""Which fault befalls which part, and when: a list made from a seed alone. Pure; it must never know how a fault is
made.

Every kind comes once before any comes twice, and within a kind every part that it can befall. One process of each role
is never ended: what grows over hours is seen in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

EVERY_S = 10.0
LENGTH_S = (1.0, 6.0)

SERVICES = ("prefill", "decode", "router", "coordinator")
BEFALLS: dict[str, tuple[str, ...]] = {
    "kill": (*SERVICES, "etcd"),
    "stop": (*SERVICES, "etcd"),
    "restart": (*SERVICES, "etcd"),
    "partition": (*SERVICES, "etcd"),
    "apart": ("prefill", "decode"),
    "disk": (*SERVICES, "etcd"),
    "clock": SERVICES,
    "rate": (*SERVICES, "etcd"),
    "delay": (*SERVICES, "etcd"),
    "loss": (*SERVICES, "etcd"),
}
"""The roles that each kind befalls:

- ``kill``: SIGKILL, and after the length started again at the same address
- ``stop``: SIGSTOP, after the length SIGCONT
- ``restart``: SIGTERM, and once it has ended started again at the same address
- ``partition``: what the part sends and is sent goes nowhere, in silence
- ``apart``: the same between it and one ``peer`` alone
- ``disk``: the disk that it writes its files and its log on is full
- ``clock``: its wall clock jumps by ``amount`` seconds, and back
- ``rate``: its link carries ``amount`` Mbit/s each way (a token bucket)
- ``delay``: each of its packets takes ``amount`` milliseconds longer, each way
- ``loss``: a share ``amount`` of its packets is lost, each way
"""
ENDING = ("kill", "restart")
SPARED = ("p1", "d2", "router-2", "coordinator-2")
"""No fault of the kinds ENDING befalls these parts; all others do."""
PEERS = {"prefill": ("decode", "router", "coordinator"), "decode": ("prefill", "router", "coordinator")}
AMOUNTS: dict[str, tuple[float, ...]] = {
    "clock": (-86400.0, -3600.0, -5.0, 5.0, 3600.0, 86400.0 * 400),
    "rate": (4.0, 8.0, 16.0),
    "delay": (20.0, 50.0, 100.0, 200.0),
    "loss": (0.01, 0.02, 0.05),
}


@dataclasses.dataclass(frozen=True)
class PlannedFault:
    """``at_s``: seconds after the load began. ``length_s`` of a restart is how long its part takes to end and start."""

    at_s: float
    length_s: float
    kind: str
    victim: str
    peer: str = ""
    amount: float = 0.0

    def __str__(self) -> str:
        between = f" and {self.peer}" if self.peer else ""
        amount = f" {self.amount:g}" if self.amount else ""
        return f"{self.at_s:7.1f} s  {self.kind}{amount} {self.victim}{between}, {self.length_s:.1f} s"


class _Deck:
    """Gives each of ``cards`` once in some order, then in another one."""

    def __init__(self, cards: Sequence[str], random: np.random.Generator) -> None:
        self._cards, self._random = list(cards), random
        self._left: list[str] = []

    def next(self) -> str:
        if not self._left:
            self._left = [self._cards[at] for at in self._random.permutation(len(self._cards))]
        return self._left.pop()


def plan(
    seed: int, span_s: float, parts: Mapping[str, str], kinds: Sequence[str] = tuple(BEFALLS)
) -> list[PlannedFault]:
    """The faults of a run of ``span_s`` seconds; ``parts``: role by name. One every EVERY_S, the last one early enough
    to be over before the end."""
    return list(_faults(np.random.Generator(np.random.PCG64(seed)), span_s, parts, kinds))


def _faults(
    random: np.random.Generator, span_s: float, parts: Mapping[str, str], kinds: Sequence[str]
) -> Iterator[PlannedFault]:
    order = _Deck(kinds, random)
    victims = {kind: _Deck(_befallen(kind, parts), random) for kind in kinds}
    for number in range(1, int(span_s / EVERY_S)):
        kind = order.next()
        victim = victims[kind].next()
        length_s = round(float(random.uniform(*LENGTH_S)), 1)
        peer = ""
        if kind == "apart":
            others = [name for name, role in parts.items() if role in PEERS[parts[victim]]]
            peer = others[int(random.integers(len(others)))]
        amounts = AMOUNTS.get(kind, (0.0,))
        yield PlannedFault(number * EVERY_S, length_s, kind, victim, peer, amounts[int(random.integers(len(amounts)))])


def _befallen(kind: str, parts: Mapping[str, str]) -> list[str]:
    befallen = [name for name, role in parts.items() if role in BEFALLS[kind]]
    return [name for name in befallen if kind not in ENDING or name not in SPARED]
