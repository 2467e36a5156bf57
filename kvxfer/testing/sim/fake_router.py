"""Posts requests: mints transfer ids, sends both legs at their own times, and tries again with another source as a new
transfer; must never reuse an id for another pair.
"""

from __future__ import annotations

import dataclasses

from kvxfer.testing.sim.faults import Kind, TransferPhase
from kvxfer.testing.sim.source_owner import PrefillOrder, meaning
from kvxfer.testing.sim.view import DecodeOrder, ProcessView, WorldView
from kvxfer.testing.sim.virtual_clock import MS, US

_TRIES_MAX = 3


@dataclasses.dataclass
class _FakeRequest:
    prompt: int
    blocks: int
    first: int
    destination: str
    tries: int = 0
    is_served: bool = False


@dataclasses.dataclass
class _FakeAttempt:
    request: _FakeRequest
    leg: PrefillOrder
    source: str


class FakeRouter:
    def __init__(self, world: WorldView) -> None:
        self._world, self._rng, self._clock = world, world.rng, world.clock
        self._attempts: dict[bytes, _FakeAttempt] = {}
        self._late: set[bytes] = set()
        self._posted = 0
        self._is_stopped = False

    def begin(self) -> None:
        options, rng = self._world.options, self._rng
        until = options.chaos_ns - 1000 * MS
        for index in range(rng.randint(options.transfers, options.transfers * 3 // 2)):
            at = 100 * MS + rng.randrange(0, until - 100 * MS)
            self._clock.call_at(at, self._post, index + 1)

    def stop(self) -> None:
        self._is_stopped = True

    # --- what happens elsewhere ---

    def booted(self, process: ProcessView) -> None:
        """An incarnation began: the last legs that its slot was asked for may be asked of it again, under the same
        ids."""
        if not process.name.startswith("p") or self._rng.random() >= self._world.weights[Kind.REGRANT]:
            return
        for track in list(self._world.open.values()):
            attempt = self._attempts.get(track.id)
            if attempt is not None and attempt.source == process.name:
                delay = 0 if self._rng.random() < 0.5 else self._rng.randrange(0, 50 * MS)
                process.later(delay, process.owner.start, attempt.leg)

    def pulled(self, order: DecodeOrder) -> None:
        self._clock.call_after(order.deadline_ns - 1, self._deadline, order.id)
        if order.id in self._late:
            self._world.strike(Kind.LATE_READER, [self._world.open[order.id]])

    def not_pulled(self, id_: bytes) -> None:
        """The destination could not even begin."""
        self._try_again(self._attempts[id_])

    def finished(self, process: ProcessView, order: DecodeOrder, state: str, code: str) -> None:
        attempt = self._attempts[order.id]
        if state == "COMMITTED":
            if not attempt.request.is_served:
                attempt.request.is_served = True
                self._world.report.served += 1
            return
        source = order.source
        if self._rng.random() < 0.5 and source.is_alive and source.owner is not None:
            source.later(self._rng.randrange(MS, 30 * MS), source.owner.end, order.id, "REVOKE")
        if state == "FAILED":
            self._try_again(attempt)

    # --- posting ---

    def _post(self, prompt: int) -> None:
        options, rng = self._world.options, self._rng
        blocks = rng.randint(1, options.transfer_blocks_max)
        source, shares = self._anywhere("p"), b""
        if self._attempts and rng.random() < 0.2:  # a prompt that was asked for before
            shares, earlier = list(self._attempts.items())[-1]
            prompt, blocks, source = earlier.request.prompt, earlier.request.blocks, earlier.source
        first = rng.randrange(0, blocks) if rng.random() < 0.2 else 0
        request = _FakeRequest(prompt, blocks, first, self._anywhere("d"))
        self._world.report.requests += 1
        self._attempt(request, source, shares)

    def _anywhere(self, prefix: str, but: str = "") -> str:
        return self._rng.choice([name for name in self._world.slots if name.startswith(prefix) and name != but])

    def _try_again(self, attempt: _FakeAttempt) -> None:
        request = attempt.request
        if self._is_stopped or request.tries >= _TRIES_MAX:
            return
        source = attempt.source
        if self._rng.random() < self._world.weights[Kind.SECOND_SOURCE]:
            source = self._anywhere("p", source)
            if attempt.leg.id in self._world.tracks:
                self._world.strike(Kind.SECOND_SOURCE, [self._world.tracks[attempt.leg.id]])
        self._clock.call_after(self._rng.randrange(MS, 100 * MS), self._attempt, request, source, attempt.leg.id)

    def _attempt(self, request: _FakeRequest, source_name: str, shares: bytes) -> None:
        if self._is_stopped:
            return
        world, rng, options = self._world, self._rng, self._world.options
        source, destination = world.slots[source_name].process, world.slots[request.destination].process
        assert source is not None
        assert destination is not None
        request.tries += 1
        if source.ref is None or destination.ref is None:  # a membership without them: the router finds no worker
            self._clock.call_after(300 * MS, self._attempt, request, source_name, shares)
            return
        id_ = rng.randbytes(16)
        is_short = rng.random() < world.weights[Kind.EXPIRED_GRANT]
        is_late = rng.random() < world.weights[Kind.LATE_READER]
        ttl = rng.randrange(20 * MS, 400 * MS) if is_short or is_late else options.grant_ttl_ns
        reader = request.destination if rng.random() < 0.9 else ""
        leg = PrefillOrder(
            id_,
            request.prompt,
            request.blocks,
            reader,
            ttl,
            rng.randint(1, 4),
            rng.randrange(400 * US, 80 * MS),
            shares,
        )
        self._attempts[id_] = _FakeAttempt(request, leg, source_name)
        lanes = self._lanes()
        is_hurried = rng.random() < world.weights[Kind.DEADLINE]
        deadline = rng.randrange(2 * MS, 500 * MS) if is_hurried else 30_000 * MS
        content_digest = meaning(request.prompt) if rng.random() < 0.8 else bytes(32)
        order = DecodeOrder(id_, source, source.ref, request.first, request.blocks, lanes, deadline, content_digest)
        if rng.random() < world.weights[Kind.SLOW_READ]:
            world.slow_down(id_, rng.choice((20, 100, 400, 1000)))
        if is_late:
            self._late.add(id_)
        self._clock.call_after(rng.randrange(0, 60 * MS), self._send_leg, source_name, leg)
        wait = ttl + rng.randrange(0, 300 * MS) if is_late else rng.randrange(0, 60 * MS)
        self._clock.call_after(wait, self._send_order, request.destination, order)

    def _lanes(self) -> tuple[object, ...]:
        lane = self._world.machines.Lane
        choices = (
            (lane.MEMORY,),
            (lane.STREAM,),
            (lane.MAPPED, lane.STREAM),
            (lane.MAPPED, lane.MEMORY, lane.STREAM),
            (lane.CMA, lane.UCX, lane.STREAM),
            (lane.UNIX, lane.STREAM),
        )
        return self._rng.choices(choices, (4, 4, 2, 1, 1, 1))[0]

    def _send_leg(self, name: str, leg: PrefillOrder) -> None:
        """To the process that runs there now: it may be another incarnation than the one that the destination is told
        of."""
        process = self._world.slots[name].process
        if process is not None and process.is_alive and process.owner is not None:
            process.run(process.owner.start, leg)

    def _send_order(self, name: str, order: DecodeOrder) -> None:
        process = self._world.slots[name].process
        if process is None or not process.is_alive or process.owner is None or self._world.is_calm:
            return
        process.run(process.owner.pull, order)

    def _deadline(self, id_: bytes) -> None:
        """A transfer that is not final now meets its deadline."""
        track = self._world.open.get(id_)
        if track is not None and self._world.phase(track) is not TransferPhase.FINAL:
            self._world.strike(Kind.DEADLINE, [track])
