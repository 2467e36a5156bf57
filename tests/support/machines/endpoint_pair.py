"""Two endpoints on a wire that a test holds in its hands: frame by frame, on its own clock; decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvxfer._native import _core
from kvxfer.testing.sim.virtual_clock import MS

KEY = b"k" * 32


class Pair:
    """Endpoints ``a`` and ``b`` that know each other; ``limits`` of both, or by name. Frames lie on ``wire`` until
    :meth:`pump` delivers them; other effects are collected per endpoint in ``told``.
    """

    def __init__(self, limits: Any = None, *, block_bytes: int = 16) -> None:
        self.now = 10 * MS
        self.refs = {name: _core.AgentRef(name, 1, name.encode() * 16) for name in "ab"}
        each = limits if isinstance(limits, dict) else dict.fromkeys("ab", limits or _core.EndpointLimits())
        self.ends = {name: _core.Endpoint(ref, each[name]) for name, ref in self.refs.items()}
        self.told: dict[str, list[Any]] = {"a": [], "b": []}
        self.wire: list[tuple[str, int, Any]] = []
        self.peer_session: dict[tuple[str, int], tuple[str, int]] = {}
        self.reachable = True
        for name in "ab":
            self.ends[name].add_pool(_core.PoolInfo(1, 64, block_bytes, b"d" * 32, True))
            self.introduce(name)

    def introduce(self, name: str) -> None:
        other = self.other(name)
        self.ends[name].set_peer(self.refs[other], KEY, _core.SessionKind.MEMORY)

    def other(self, name: str) -> str:
        return "b" if name == "a" else "a"

    def take(self, name: str, kind: type) -> list[Any]:
        """The collected effects of one kind, removed."""
        found = [effect for effect in self.told[name] if isinstance(effect, kind)]
        self.told[name] = [effect for effect in self.told[name] if not isinstance(effect, kind)]
        return found

    def do(self, name: str, effects: list[Any]) -> None:
        """Perform what can be performed here; collect the rest."""
        for effect in effects:
            if isinstance(effect, _core.SendFrame):
                self.wire.append((name, effect.session, effect.frame))
            elif isinstance(effect, _core.Dial):
                self._dial(name, effect)
            elif isinstance(effect, _core.Hangup):
                self.told[name].append(effect)
                self.cut(name, effect.session)
            else:
                self.told[name].append(effect)

    def _dial(self, name: str, effect: Any) -> None:
        other, end = self.other(name), self.ends[name]
        if not self.reachable:
            text = "no route"
            self.do(name, end.dial_failed(effect.peer, effect.kind, _core.Code.transport, text, self.now))
            return
        mine, effects = end.dialed(effect.peer, effect.kind, b"1" * 32, self.now)
        theirs, accepted = self.ends[other].accepted(effect.kind, b"2" * 32, self.now)
        self.peer_session[name, mine] = (other, theirs)
        self.peer_session[other, theirs] = (name, mine)
        self.do(name, effects)
        self.do(other, accepted)

    def cut(self, name: str, session: int) -> None:
        peer = self.peer_session.pop((name, session), None)
        if peer is not None:
            del self.peer_session[peer]
            self.do(peer[0], self.ends[peer[0]].closed(peer[1], self.now))
            self.do(name, self.ends[name].closed(session, self.now))

    def cut_all(self) -> None:
        self.wire.clear()
        while self.peer_session:
            self.cut(*next(iter(self.peer_session)))

    def pump(self, fate: Callable[[Any], int] = lambda frame: 1) -> None:
        """Deliver everything; ``fate`` says how many times each frame arrives."""
        while self.wire:
            name, session, frame = self.wire.pop(0)
            copies = fate(frame)
            if (name, session) in self.peer_session:
                other, theirs = self.peer_session[name, session]
                for _ in range(copies):
                    self.do(other, self.ends[other].on_frame(theirs, frame, self.now))

    def advance(self, ns: int, fate: Callable[[Any], int] = lambda frame: 1) -> None:
        """Let time pass, waking each endpoint when it asked for it."""
        until = self.now + ns
        for _ in range(100_000):
            self.pump(fate)
            due = min(self.ends[name].next_deadline() for name in "ab")
            if due > until:
                break
            self.now = max(self.now, due)
            for name in "ab":
                if self.ends[name].next_deadline() <= self.now:
                    self.do(name, self.ends[name].tick(self.now))
                    assert self.ends[name].next_deadline() > self.now
        else:
            raise AssertionError("it never comes to rest")
        self.now = until
