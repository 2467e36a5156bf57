"""The network of the ``memory`` lane: a queue of actions between the agents of one process.

It decides when what was sent arrives, and in which order: everything in the order it was sent, one action at a
:meth:`MemoryNetwork.step`, after ``latency_ns`` of the network's own clock. It must never look into what it carries.

By default time is virtual: it stands still while actions are due, and jumps to the next deadline when none is. With a
real clock the network can drive itself from an asyncio loop (:meth:`MemoryNetwork.drive`), so that agents live in it.
Faults come from one hook, which sees everything that is about to arrive and says what becomes of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import heapq
import itertools
import os
import random
import threading
from collections.abc import Callable
from typing import Protocol

from kvxfer._native import _core
from kvxfer.clock import NS_PER_S, Clock
from kvxfer.errors import InvalidArgumentError
from kvxfer.policy.lanes import MEMORY_HOST
from kvxfer.types import AgentRef


class Node(Protocol):
    """A transport that joined the network, as the network sees it."""

    @property
    def ref(self) -> AgentRef: ...

    def next_deadline(self) -> int:
        """The time of its machines' next tick."""
        ...

    def tick(self) -> None:
        """Tick its machines."""
        ...

    def cut(self, other: AgentRef) -> None:
        """Lose every connection to that agent."""
        ...


class PassageFate(enum.Enum):
    """The fate of an arrival. A dial or a read that is dropped or cut fails."""

    ARRIVE = "arrive"
    DROP = "drop"
    TWICE = "twice"
    """Frames only: a dial or a read arrives once."""
    HOLD = "hold"
    """Kept until :meth:`MemoryNetwork.release_held`."""
    CUT = "cut"
    """Lost together with the connection."""


@dataclasses.dataclass(frozen=True)
class Passage:
    """Something about to arrive: ``what`` is ``dial``, ``read`` or a frame's name (``pull``, ``ready``, ...)."""

    sender: AgentRef
    receiver: AgentRef
    what: str


class MemoryNetwork:
    """The agents of one process and what is on its way between them. Thread-safe."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        seed: int = 0,
        latency_ns: int = 0,
        fault: Callable[[Passage], PassageFate] | None = None,
    ) -> None:
        """``clock``: a real one; without it time is virtual. ``seed`` draws nonces. ``fault`` decides each Passage."""
        self.fault = fault
        self.latency_ns = latency_ns
        self.lock = threading.RLock()
        self.random = random.Random(seed)
        self.name = f"{MEMORY_HOST}{os.getpid()}-{next(_numbers)}"
        self._clock = clock
        self._virtual_ns = 0
        self._nodes: dict[AgentRef, Node] = {}
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._held: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<MemoryNetwork {len(self._nodes)} agents, {len(self._queue)} on the way>"

    @property
    def now_ns(self) -> int:
        return self._virtual_ns if self._clock is None else self._clock.now_ns()

    def step(self) -> bool:
        """Do the one action that is due, or tick the machines; whether there was anything to do.

        In virtual time, when nothing is due the clock jumps to the next moment at which something is.
        """
        with self.lock:
            next_ns = self.next_ns()
            if next_ns == _core.NEVER_NS:
                return False
            if next_ns > self.now_ns:
                if self._clock is not None:
                    return False
                self._virtual_ns = next_ns
            if self._queue and self._queue[0][0] <= self.now_ns:
                heapq.heappop(self._queue)[2]()
            else:
                for node in list(self._nodes.values()):
                    node.tick()
            return True

    def run(self, until: Callable[[], bool], *, steps_max: int = 1_000_000) -> bool:
        """Step until ``until()`` holds (then True), or nothing is left to do or ``steps_max`` is reached."""
        for _ in range(steps_max):
            if until():
                return True
            if not self.step():
                break
        return until()

    def advance(self, duration_s: float) -> None:
        """Let virtual time pass, doing all that falls due in it. Raises InvalidArgumentError on a real clock."""
        if self._clock is not None:
            raise InvalidArgumentError("time passes by itself in a network with a real clock")
        end_ns = self._virtual_ns + round(duration_s * NS_PER_S)
        while self.next_ns() <= end_ns:
            self.step()
        self._virtual_ns = end_ns

    def next_ns(self) -> int:
        """The time of the next action, by the network's clock."""
        with self.lock:
            moments = [node.next_deadline() for node in self._nodes.values()]
            if self._queue:
                moments.append(self._queue[0][0])
            return min(moments, default=_core.NEVER_NS)

    def release_held(self) -> None:
        """Let all held actions arrive, in their order."""
        with self.lock:
            held, self._held = self._held, []
            for action in held:
                self.call_soon(action)

    def cut(self, one: AgentRef, other: AgentRef) -> None:
        """Break every connection between two incarnations, as a network does: what was on its way is lost."""
        with self.lock:
            node = self.find(one)
            if node is not None:
                node.cut(other)

    def drive(self) -> None:
        """Run from the running asyncio loop from now on, until :meth:`stop`. Needs a real clock."""
        if self._clock is None:
            raise InvalidArgumentError(
                "a network that a loop drives needs a real clock: time would jump to every deadline"
            )
        self._loop = asyncio.get_running_loop()
        self.wake()

    def stop(self) -> None:
        with self.lock:
            self._loop = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    # --- for the transports; the lock is held ---

    def join(self, node: Node) -> None:
        if node.ref in self._nodes:
            raise InvalidArgumentError(f"{node.ref} is in this network already")
        self._nodes[node.ref] = node

    def leave(self, node: Node) -> None:
        self._nodes.pop(node.ref, None)

    def find(self, ref: AgentRef) -> Node | None:
        return self._nodes.get(ref)

    def call_soon(self, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_ns + self.latency_ns, next(self._sequence), action))
        self.wake()

    def judge(
        self,
        passage: Passage,
        arrive: Callable[[], None],
        *,
        cut: Callable[[], None],
        drop: Callable[[], None] = lambda: None,
    ) -> None:
        """Let ``arrive`` happen, or the fate that the fault hook chose."""
        fate = PassageFate.ARRIVE if self.fault is None else self.fault(passage)
        if fate is PassageFate.CUT:
            cut()
        elif fate is PassageFate.DROP:
            drop()
        elif fate is PassageFate.HOLD:
            self._held.append(arrive)
        else:
            arrive()
            if fate is PassageFate.TWICE and passage.what not in ("dial", "read"):
                arrive()

    def wake(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._pump)

    def _pump(self) -> None:
        with self.lock:
            while self.step():
                pass
            if self._loop is None:
                return
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
            next_ns = self.next_ns()
            if next_ns != _core.NEVER_NS:
                self._timer = self._loop.call_later(max(next_ns - self.now_ns, 0) / NS_PER_S, self._pump)


_numbers = itertools.count()
