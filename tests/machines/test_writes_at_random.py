"""One write over several lanes, and everything at random: what arrives when and how often, one end of a session that
goes before the other, reads that land late, fail, or find that a lane does not serve, sockets that come and go.
Whatever happens: bytes land only while the offer is alive, never by two reads at once, and a commit has all of them;
both ends are told once, and hold nothing in the end.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from kvxfer._native import _core
from kvxfer._native._core import Code, Lane, SessionKind
from kvxfer.testing.sim.elements import places
from kvxfer.testing.sim.virtual_clock import MS, S
from tests.support.limits import endpoint_limits
from tests.support.machines.admissions import ADMISSIONS
from tests.support.machines.region_pair import RegionPair

ID, NOTE = b"t" * 16, b"n"
SOURCE, TARGET, COUNT = 7, 9, 8
DATA = bytes(range(1, 129))
LANES = [Lane.MAPPED, Lane.CMA, Lane.UNIX, Lane.STREAM, Lane.UCX]
SEEDS = 600
Key = tuple[str, int]


@dataclasses.dataclass(eq=False)
class Landing:
    """A read that ``b`` has under way. ``over``: the session whose next bytes it is; ``parts``: what they are."""

    token: int
    to: Any
    source: Any = None
    lane: Any = None
    over: Key | None = None
    parts: list[bytes] = dataclasses.field(default_factory=list)


class Chaos(RegionPair):
    def __init__(self, seed: int, kind: str) -> None:
        """``kind``: how ``b`` knows ``a``."""
        self.random = random.Random(seed)
        self.kind, self.is_calm = kind, False
        most = 16 * self.random.choice([1, 2, 3, 8])
        super().__init__(endpoint_limits(read_bytes_max=most, data_bytes_max=most))
        source = {"is_shareable": self.random.random() < 0.8, "is_exposed": self.random.random() < 0.8}
        self.add_region("a", SOURCE, DATA, **source)
        self.add_region("b", TARGET, bytes(len(DATA)), is_shareable=True)
        self.unmappable = {lane for lane in LANES if self.random.random() < 0.2}
        self.closed: set[Any] = set()
        self.dials: list[tuple[str, Any]] = []
        self.landing: Landing | None = None

    def introduce(self, name: str) -> None:
        admitting = ADMISSIONS.get(self.kind)
        if admitting is None:
            super().introduce(name)
        elif name == "b":
            self.ends["b"].admit(admitting.admission)
        else:
            key = admitting.key(self.refs["b"], self.refs["a"])
            self.ends["a"].set_peer(self.refs["b"], key, _core.SessionKind.MEMORY)

    def _dial(self, name: str, effect: Any) -> None:
        self.dials.append((name, effect))

    # --- what may happen ---

    def dial(self, name: str, effect: Any) -> None:
        self.dials.remove((name, effect))
        self.reachable = effect.kind not in self.closed and (self.is_calm or self.random.random() < 0.8)
        if not self.reachable and self.random.random() < 0.3:
            gone = self.ends[name].dial_failed(effect.peer, effect.kind, Code.no_lane, "no socket", self.now)
            return self.do(name, gone)
        return super()._dial(name, effect)

    def deliver(self, key: Key) -> None:
        at = next(i for i, (name, session, _) in enumerate(self.wire) if (name, session) == key)
        _, _, frame = self.wire.pop(at)
        theirs = self.peer_session.get(key)
        if theirs is None or theirs not in self.peer_session:
            return
        other, session = theirs
        if isinstance(frame, tuple):
            data, parts = frame
            wanted = self.ends[other].data_arrives(session, data, self.now)
            if wanted.token:
                self.begin(Landing(wanted.token, wanted.to, over=theirs, parts=parts))
            return
        is_safe = self.is_calm or isinstance(frame, _core.Hello)
        for _ in range(1 if is_safe else self.random.choices([0, 1, 2], [1, 20, 2])[0]):
            self.do(other, self.ends[other].on_frame(session, frame, self.now))

    def send(self, effect: Any) -> None:
        self.told["a"].remove(effect)
        if ("a", effect.session) in self.peer_session:
            parts = self.bytes_of("a", effect.source)
            self.wire.append(("a", effect.session, (effect.frame, parts)))
            frame = effect.frame
            sent = self.ends["a"].data_sent(effect.session, frame.id, frame.attempt, frame.count, self.now)
            self.do("a", sent)

    def begin(self, landing: Landing) -> None:
        assert self.landing is None, "two reads at once"
        self.landing = landing

    def end_read(self) -> None:
        """It lands, or it is a lane that does not serve, or it fails."""
        read, self.landing = self.landing, None
        assert read is not None
        end = self.ends["b"]
        if read.lane in self.unmappable or (not self.is_calm and self.random.random() < 0.1):
            code = Code.no_lane if read.lane in self.unmappable else self.random.choice([Code.transport, Code.no_lane])
            if read.over is None or code == Code.transport:
                return self.do("b", end.read_stopped(ID, read.token, code, "no", self.now))
        parts = read.parts or self.bytes_of("a", read.source)
        if end.is_landing(ID, read.token):
            assert not any(isinstance(event, _core.OfferEnded) for event in self.told["b"]), "landed after the end"
            for place, part in zip(places(read.to), parts, strict=True):
                self.memory["b"][TARGET][place.offset : place.offset + place.length] = part
        return self.do("b", end.read_landed(ID, read.token, self.now))

    def close_end(self, key: Key) -> None:
        """One end of a session learns that it is gone, and the other does not yet."""
        del self.peer_session[key]
        self.do(key[0], self.ends[key[0]].closed(key[1], self.now))
        if self.landing is not None and self.landing.over == key:
            read, self.landing = self.landing, None
            self.do("b", self.ends["b"].read_stopped(ID, read.token, Code.transport, "cut", self.now))

    def cut(self, name: str, session: int) -> None:  # of a Hangup: told already
        self.peer_session.pop((name, session), None)

    def pass_time(self) -> None:
        due = min(self.ends[name].next_deadline() for name in "ab")
        step = (
            min(max(due - self.now, MS), S) if self.is_calm else self.random.choice([MS, 10 * MS, 100 * MS, 600 * MS])
        )
        self.now += step
        for name in "ab":
            if self.ends[name].next_deadline() <= self.now:
                self.do(name, self.ends[name].tick(self.now))

    def trouble(self) -> bool:
        chance, pick = self.random.random(), sorted(self.peer_session)
        if chance < 0.08 and pick:
            self.close_end(self.random.choice(pick))
        elif chance < 0.11:
            self.closed = set(self.random.sample([SessionKind.UNIX, SessionKind.TCP], self.random.randrange(3)))
        elif chance < 0.114:
            self.do("a", self.ends["a"].cancel(ID, self.now))
        elif chance < 0.118 and self.ends["b"].counts().regions:
            self.remove_region("b", TARGET)
        elif chance < 0.2:
            self.pass_time()
        else:
            return False
        return True

    def step(self) -> None:
        if not self.is_calm and self.trouble():
            return
        for effect in self.take("b", _core.ReadBlocks):
            self.begin(Landing(effect.token, effect.to, effect.source, effect.lane))
        taken = self.landing.over if self.landing is not None else None
        acts: list[tuple[Any, ...]] = [(self.dial, *dial) for dial in self.dials]
        acts += [
            (self.deliver, key)
            for key in sorted({(n, s) for n, s, _ in self.wire})
            if taken is None or self.peer_session.get(key) != taken
        ]
        acts += [(self.send, effect) for effect in self.told["a"] if isinstance(effect, _core.SendData)]
        acts += [(self.end_read,)] if self.landing is not None else []
        half = [key for key, theirs in self.peer_session.items() if theirs not in self.peer_session]
        if half and self.random.random() < 0.1:
            acts = [(self.close_end, key) for key in sorted(half)]
        if not acts:
            return self.pass_time()
        act, *arguments = self.random.choice(acts)
        return act(*arguments)

    def is_idle(self) -> bool:
        counts = [self.ends[name].counts() for name in "ab"]
        return all(not (c.grants.alive or c.transfers_live or c.transfers_draining) for c in counts)

    def play(self) -> Any:
        lanes = self.random.sample(LANES, self.random.randrange(1, 5))
        rows = ([(SOURCE, 0, 16, 16, COUNT)], [(TARGET, 0, 16, 16, COUNT)])
        self.post("a", "push", ID, *rows, lanes=lanes, notification=NOTE, deadline_s=400)
        for _ in range(self.random.choice([20, 60, 150, 300])):
            self.step()
        self.is_calm, self.closed = True, set()
        until = self.now + 40 * S
        while self.now < until and not (self.is_idle() and self.landing is None and not self.wire):
            self.step()
        assert self.is_idle()
        (final,) = self.take("a", _core.TransferFinal)
        assert len(self.take("a", _core.TransferDrained)) == 1
        offers = self.take("b", _core.OfferEnded)
        assert len(offers) <= 1
        is_committed = any(offer.state.name == "COMMITTED" for offer in offers)
        assert [event.payload for event in self.take("b", _core.NotifReceived)] == [NOTE] * is_committed
        if is_committed:
            assert bytes(self.memory["b"][TARGET]) == DATA
        if final.state.name == "COMMITTED":
            assert is_committed
        return final, is_committed


@pytest.mark.parametrize("kind", ["registered", *ADMISSIONS])
def test_a_write_that_goes_by_many_lanes(kind: str) -> None:
    ways: set[tuple[str, str]] = set()
    for seed in range(SEEDS):
        try:
            final, is_committed = Chaos(seed, kind).play()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        if final.code in (Code.no_lane, Code.refused, Code.grant_revoked):
            assert not is_committed, f"seed {seed}: {final.text}"
        ways.add((final.state.name, final.lane_notes and "several"))
    assert ways >= {("COMMITTED", ""), ("COMMITTED", "several"), ("FAILED", "several"), ("CANCELLED", "")}
