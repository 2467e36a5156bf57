"""The control plane of a simulated world: a coordinator around the real directory machine and one client in each
process around the real mirror, joined by streams that break; must never look into a data session.

Messages are values, not bytes: the gRPC conversion has tests of its own, and what matters here is when each side learns
that an incarnation ended, or is told so wrongly.
"""

from __future__ import annotations

import itertools

from kvxfer.errors import KvxferError
from kvxfer.protocol.directory import Change, CloseStream, Directory, Effect, Hello
from kvxfer.protocol.handshake import session_key, session_root
from kvxfer.protocol.mirror import Mirror
from kvxfer.testing.sim.view import ProcessView, WorldView
from kvxfer.testing.sim.virtual_clock import MS
from kvxfer.types import AgentRef, DataAddress, Load, Role, WorkerInfo

_LATENCY = 1 * MS
_RETRY = 200 * MS
_NO_LOAD = Load()


class Coordinator:
    """One coordinator process; :meth:`stop` and :meth:`start` lose everything but the number counter (the store)."""

    def __init__(self, world: WorldView) -> None:
        self._world = world
        self._clock = world.clock
        self._numbers = itertools.count(1)
        self._streams: dict[int, Client] = {}
        self._sent: dict[int, int | None] = {}
        self._run = 0
        self.is_up = False
        self.start()

    def start(self) -> None:
        self._run += 1
        self.is_up = True
        self._directory = Directory(self._world.options.liveness, self._clock.now, epoch=self._world.rng.randbytes(16))
        self._tick(self._run)

    def stop(self) -> None:
        self.is_up = False
        self._run += 1
        clients, self._streams, self._sent = list(self._streams.values()), {}, {}
        for client in clients:
            client.cut(None)

    def register(self, client: Client, run: int, attempt: int) -> None:
        """A Hello arrived that was sent to this ``run`` of the coordinator."""
        if run != self._run or not client.process.is_alive:
            return
        try:
            registration = self._directory.register(
                client.hello(), fresh_number=next(self._numbers), now_ns=self._clock.now
            )
        except KvxferError:
            return client.process.later(_RETRY, client.connect)
        self._perform(registration.effects)
        self._streams[registration.stream], self._sent[registration.stream] = client, None
        client.process.later(_LATENCY, client.registered, registration.ref, registration.stream, attempt)
        self._publish()

    def heartbeat(self, client: Client, stream: int, run: int) -> None:
        if run != self._run:  # that connection has no listener any more
            return client.cut(stream)
        try:
            self._perform(self._directory.heartbeat(stream, _NO_LOAD, is_draining=False, now_ns=self._clock.now))
        except KvxferError:
            client.cut(stream)

    def ended(self, stream: int, run: int) -> None:
        """The connection behind ``stream`` broke."""
        if run == self._run:
            self._streams.pop(stream, None)
            self._sent.pop(stream, None)
            self._perform(self._directory.stream_ended(stream, now_ns=self._clock.now))
            self._publish()

    @property
    def run(self) -> int:
        return self._run

    def _tick(self, run: int) -> None:
        if run == self._run:
            self._perform(self._directory.tick(self._clock.now))
            self._publish()
            self._clock.call_after(self._world.options.heartbeat_ns // 2, self._tick, run)

    def _perform(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, CloseStream):
                client = self._streams.pop(effect.stream, None)
                self._sent.pop(effect.stream, None)
                if client is not None:
                    client.cut(effect.stream)
            else:
                self._world.log(f"coordinator {type(effect).__name__} {getattr(effect, 'ref', '')}")

    def _publish(self) -> None:
        for stream, client in self._streams.items():
            sent = self._sent[stream]
            if sent is None or sent < self._directory.shape_revision:
                change = self._directory.change_since(sent)
                self._sent[stream] = change.revision
                self._clock.call_after(2 * _LATENCY, client.process.run, client.apply, change, stream)


class Client:
    """The agent's side: registers for ever, beats, and tells its endpoint which agents run and which died."""

    def __init__(self, process: ProcessView) -> None:
        self.process = process
        self._world = process.world
        self._boot_nonce = self._world.rng.randbytes(16)
        self._number = 0
        self._mirror = Mirror()
        self._root = session_root(b"the token of a simulated cluster")
        self._stream: int | None = None
        self._run = 0
        self._attempt = 0
        self._has_rhythm = False

    def hello(self) -> Hello:
        role = Role.PREFILL if self.process.name.startswith("p") else Role.DECODE
        info = WorkerInfo(self.process.name, role, "model", "")
        return Hello(info, DataAddress("127.0.0.1", 1, "", ""), self._boot_nonce, self._number)

    def connect(self) -> None:
        coordinator = self._world.coordinator
        if not coordinator.is_up or self._world.is_control_blocked(self.process.name):
            return self.process.later(_RETRY, self.connect)
        self._attempt += 1
        self._run = coordinator.run
        self._world.clock.call_after(_LATENCY, coordinator.register, self, self._run, self._attempt)
        attempt = self._attempt
        self.process.later(4 * _LATENCY + _RETRY, self._check, attempt)

    def _check(self, attempt: int) -> None:
        if attempt == self._attempt and self._stream is None:
            self.connect()

    def registered(self, ref: AgentRef, stream: int, attempt: int) -> None:
        if attempt != self._attempt:
            return
        self._stream = stream
        self._number = ref.incarnation.number
        if self.process.ref is None:
            self.process.boot(self._world.native(ref, self.process))
            self._world.booted(self.process)
        if not self._has_rhythm:
            self._has_rhythm = True
            self._beat()

    def cut(self, ended: int | None) -> None:
        """The stream is gone, whichever side ended it; ``None``: the one that there is, begun or not."""
        stream, run = self._stream, self._run
        if ended is not None and ended != stream:
            return
        self._stream = None
        self._attempt += 1
        if stream is not None and self._world.coordinator.run == run:
            self._world.coordinator.ended(stream, run)
        self.process.later(self._world.rng.randrange(5 * MS, 150 * MS), self.connect)

    def died(self) -> None:
        """The process behind it was killed; the coordinator notices, as a server notices a reset."""
        if self._stream is not None:
            coordinator = self._world.coordinator
            self._world.clock.call_after(_LATENCY, coordinator.ended, self._stream, self._run)

    def apply(self, change: Change, stream: int) -> None:
        if stream != self._stream:
            return
        membership = self._mirror.apply(change)
        if membership is None:
            return
        process, world = self.process, self._world
        own = world.public_ref(process)
        gone = [ref for ref in membership.gone if ref != own]
        present = [member.ref for member in membership.members if member.ref != own]
        is_gone_first = world.rng.random() < 0.5
        if is_gone_first:
            self._report_dead(gone)
        for ref in present:
            key = session_key(self._root, own, ref)
            if is_gone_first or ref not in gone:
                process.endpoint.set_peer(world.native(ref), key, world.control_kind)
        if not is_gone_first:
            self._report_dead(gone)
            for ref in [ref for ref in present if ref in gone]:
                process.endpoint.set_peer(world.native(ref), session_key(self._root, own, ref), world.control_kind)

    def _report_dead(self, gone: list[AgentRef]) -> None:
        process = self.process
        for ref in gone:
            process.world.log(f"{process!r} hears that {ref} is gone")
            process.perform(process.endpoint.peer_dead(process.world.native(ref), process.clock.now))

    def _beat(self) -> None:
        if self._stream is not None and not self._world.is_control_blocked(self.process.name):
            self._world.clock.call_after(_LATENCY, self._world.coordinator.heartbeat, self, self._stream, self._run)
        self.process.later(self._world.options.heartbeat_ns, self._beat)
