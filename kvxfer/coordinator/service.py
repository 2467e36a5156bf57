"""The Coordinator service: carries messages between gRPC streams and the directory machine. Decides nothing about
membership; must never be on the data path.

The service keeps a StreamState for each stream: the orders that its receiver was not told yet, and the revision of the
membership that its receiver has. It computes an update when it sends it: the difference between that revision and the
directory. So no updates queue up, and a slow receiver costs no memory. An agent's heartbeat is answered with an update,
even an empty one, and a watcher gets one in each heartbeat interval, because clients take it for the coordinator's
heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from kvxfer._pb import control_pb2 as pb
from kvxfer._pb import control_pb2_grpc
from kvxfer.clock import NS_PER_S, Clock
from kvxfer.config import CoordinatorConfig
from kvxfer.coordinator.admission import AgentAdmission, read
from kvxfer.coordinator.gate import Caller, Gate
from kvxfer.coordinator.hosts import RegisteredHosts
from kvxfer.coordinator.keeper import StoreKeeper
from kvxfer.coordinator.leg_keys import LegKeys
from kvxfer.coordinator.metrics import CoordinatorMetrics
from kvxfer.coordinator.receivers import Receivers, StreamState
from kvxfer.errors import (
    AuthenticationError,
    CoordinatorUnavailableError,
    ForbiddenError,
    InvalidArgumentError,
    KvxferError,
    OverloadedError,
    ProtocolError,
    RefusedError,
)
from kvxfer.protocol.directory import (
    CloseStream,
    Directory,
    Effect,
    IncarnationEnded,
    MemberEvent,
    OrderDrain,
    Registration,
)
from kvxfer.protocol.handshake import session_key
from kvxfer.rpc import convert
from kvxfer.rpc.link import CODE_KEY, EOF, REASON_BYTES_MAX
from kvxfer.trust.permissions import ControlCall, Subject, sends_legs
from kvxfer.types import AgentRef

log = logging.getLogger("kvxfer.coordinator")

PUSH_GAP_S = 0.02
"""Shortest time between two updates to one receiver; what changes meanwhile goes together."""

PUSHES_A_S = 2000.0
"""Updates to all agents in a second, but for one to each agent in half a heartbeat interval."""
ASKED_A_S = 1000.0
"""Names a second that one agent can ask for: its next message is read that much later."""

_STATUS: dict[type[KvxferError], grpc.StatusCode] = {
    AuthenticationError: grpc.StatusCode.UNAUTHENTICATED,
    ForbiddenError: grpc.StatusCode.PERMISSION_DENIED,
    RefusedError: grpc.StatusCode.FAILED_PRECONDITION,
    ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
    InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    CoordinatorUnavailableError: grpc.StatusCode.UNAVAILABLE,
}


class CoordinatorService(control_pb2_grpc.CoordinatorServicer):
    """One coordinator's streams. Runs on one asyncio loop."""

    def __init__(
        self,
        config: CoordinatorConfig,
        directory: Directory,
        keeper: StoreKeeper,
        root: bytes,
        clock: Clock,
        metrics: CoordinatorMetrics,
        receivers: Receivers,
        *,
        watchers_max: int,
        hosts: RegisteredHosts,
        gate: Gate,
        leg_keys: LegKeys,
    ) -> None:
        """``root``: the secret under all session keys, from :func:`kvxfer.protocol.handshake.session_root`."""
        self._config = config
        self._directory = directory
        self._keeper = keeper
        keeper.carry_out = self._carry_out
        self._root = root
        self._clock = clock
        self._metrics = metrics
        self._watchers_max = watchers_max
        self._gate = gate
        self._admission = AgentAdmission(
            directory,
            keeper,
            receivers,
            gate,
            hosts,
            clock,
            metrics,
            carry_out=self._carry_out,
            check_open=self._check_open,
        )
        self._leg_keys = leg_keys
        self._leg_period = leg_keys.period
        self._receivers = receivers
        self._messages = convert.MemberMessages()
        self._heartbeats = 0
        self._observed_ns = 0
        self._is_stopping = False
        self._closed_for: KvxferError | None = None

    def tick(self) -> None:
        """Let time pass for the directory; call a few times per heartbeat."""
        now_ns = self._clock.now_ns()
        self._carry_out(self._directory.tick(now_ns))
        if now_ns - self._observed_ns >= self._directory.pace.heartbeat_ms * 1_000_000 / 4:
            self._observed_ns = now_ns
            self._metrics.observe(self._directory.statistics(), len(self._receivers.watchers))
            self._metrics.observe_heartbeats(self._heartbeats, self._directory.pace.heartbeat_ms / 1e3)
        self._metrics.observe_store(self._keeper.failure, self._keeper.unwritten)
        if self._leg_period != self._leg_keys.period:
            self._leg_period = self._leg_keys.period
            for receiver in self._receivers:
                receiver.wake.set()

    def stop(self) -> None:
        """Tell every stream that the coordinator stops, and take no new ones."""
        self._is_stopping = True
        for receiver in self._receivers:
            receiver.is_stopping = True
            receiver.hurry()

    def end_revoked(self) -> None:
        """End the streams whose callers are revoked by now, and the incarnations of those that are agents, also of
        those whose stream was cut."""
        for stream, receiver in list(self._receivers.sessions.items()):
            if self._end_if_revoked(receiver, ControlCall.REGISTER):
                self._admission.withdraw(stream)
        for agent_id, (caller, subject) in list(self._receivers.absent.items()):
            if self._revocation(caller, ControlCall.REGISTER, subject) is not None:
                now_ns = self._clock.now_ns()
                self._carry_out(self._directory.ended(agent_id, now_ns=now_ns, cause=MemberEvent.LOST))
        for receiver in list(self._receivers.watchers):
            self._end_if_revoked(receiver, ControlCall.WATCH)

    def close_for(self, error: KvxferError) -> None:
        """End every stream with ``error``, and take no new one before :meth:`reopen`. Agents may come back then with
        their incarnations."""
        self._closed_for = error
        for receiver in self._receivers:
            receiver.close(error)

    def reopen(self) -> None:
        self._closed_for = None

    def _end_if_revoked(self, receiver: StreamState, call: ControlCall) -> bool:
        if receiver.close_error is not None:
            return False
        error = self._revocation(receiver.caller, call, receiver.subject)
        if error is not None:
            receiver.close(error)
        return error is not None

    def _revocation(self, caller: Caller, call: ControlCall, subject: Subject) -> AuthenticationError | None:
        """With what a caller is ended that is revoked by now; the audit log has it."""
        try:
            self._gate.check_revoked(caller)
        except AuthenticationError as error:
            self._gate.ended(caller, call, subject, error)
            return error
        return None

    async def Session(self, requests: Any, context: Any) -> None:
        try:
            caller = self._gate.identify(context, ControlCall.REGISTER)
            registration, receiver = await self._admission.admit(context, caller)
            try:
                await self._run_session(context, registration, receiver)
            finally:
                self._receivers.close(registration.stream)
                if not self._is_stopping:  # a stream that we end ourselves says nothing of the agent behind it
                    self._carry_out(self._directory.stream_ended(registration.stream, now_ns=self._clock.now_ns()))
        except KvxferError as error:
            await abort(context, error)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> None:
        try:
            if request.protocol_version != convert.PROTOCOL_VERSION:
                raise ProtocolError(
                    f"protocol_version {request.protocol_version} is not {convert.PROTOCOL_VERSION}, "
                    "the only one spoken here"
                )
            caller = self._gate.identify(context, ControlCall.WATCH)
            with self._gate.audited(caller, ControlCall.WATCH):
                self._check_open()
                if len(self._receivers.watchers) >= self._watchers_max:
                    raise OverloadedError(f"the coordinator keeps at most watchers_max={self._watchers_max} watchers")
            receiver = StreamState(caller)
            self._receivers.watchers.add(receiver)
            try:
                await self._push_to_watcher(context, receiver)
            finally:
                self._receivers.watchers.discard(receiver)
            raise CoordinatorUnavailableError("the coordinator is stopping")
        except KvxferError as error:
            await abort(context, error)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        try:
            caller = self._gate.identify(context, ControlCall.DRAIN)
            reason = request.reason[:REASON_BYTES_MAX]
            agent_id = convert.read_agent_id(request.agent_id)
            with self._gate.audited(caller, ControlCall.DRAIN, Subject(agent_id)):
                self._check_open()
                self._carry_out(self._directory.drain(agent_id, reason, now_ns=self._clock.now_ns()))
                self._keeper.pass_on(agent_id)
        except KvxferError as error:
            await abort(context, error)
        return pb.DrainResponse()

    async def Acquaint(self, request: pb.AcquaintRequest, context: Any) -> pb.AcquaintResponse:
        try:
            caller = self._gate.identify(context, ControlCall.ACQUAINT)
            with self._gate.audited(caller, ControlCall.ACQUAINT):
                self._check_open()
                named = convert.read_acquaintances(request)
                absent = [agent_id for agent_id in named if not self._receivers.acquaint(agent_id, named[agent_id])]
        except KvxferError as error:
            await abort(context, error)
        return pb.AcquaintResponse(absent=absent)

    def _check_open(self) -> None:
        if self._is_stopping:
            raise CoordinatorUnavailableError("the coordinator is stopping")
        if self._closed_for is not None:
            raise self._closed_for

    async def _run_session(self, context: Any, registration: Registration, receiver: StreamState) -> None:
        """Both directions of a registered stream, until either ends."""
        welcome = pb.Welcome(
            ref=convert.write_ref(registration.ref),
            heartbeat_ms=registration.pace.heartbeat_ms,
            dead_after_ms=registration.pace.dead_after_ms,
            leg_keys=self._leg_keys.accepted_by(registration.ref) if receiver.subject.has_http else (),
            return_within_ms=registration.pace.return_within_ms,
        )
        receiver.pace = registration.pace
        receiver.leg_period = self._leg_keys.period
        await context.write(pb.CoordinatorMessage(welcome=welcome))

        listener = asyncio.create_task(self._listen(context, registration.stream, receiver))
        pusher = asyncio.create_task(self._push_to_agent(context, registration.ref, receiver))
        try:
            await asyncio.wait((listener, pusher), return_when=asyncio.FIRST_COMPLETED)
            await (listener if listener.done() else pusher)
        finally:
            listener.cancel()
            pusher.cancel()
            await asyncio.gather(listener, pusher, return_exceptions=True)

    async def _listen(self, context: Any, stream: int, receiver: StreamState) -> None:
        """Feed the agent's messages to the directory, until the agent deregisters or its stream ends. A heartbeat is
        answered at once, unless an update is on its way."""
        while True:
            message = await read(context)
            if message is EOF:
                return
            now_ns = self._clock.now_ns()
            match message.WhichOneof("kind"):
                case "heartbeat":
                    heartbeat = message.heartbeat
                    effects = self._directory.heartbeat(
                        stream,
                        convert.read_load(heartbeat.load),
                        is_draining=heartbeat.is_draining,
                        now_ns=now_ns,
                        promised_ms=heartbeat.next_within_ms,
                    )
                    self._heartbeats += 1
                    self._carry_out(effects)
                    if not (receiver.revision is None or receiver.wake.is_set() or receiver.writing.locked()):
                        async with receiver.writing:
                            await context.write(self._answer(receiver))
                case "ask":
                    names = convert.read_ask(message.ask)
                    self._receivers.ask(receiver, names)
                    await asyncio.sleep(len(names) / ASKED_A_S)
                case "update_pools":
                    pools = convert.read_pools(message.update_pools.pools)
                    self._carry_out(self._directory.update_pools(stream, pools, now_ns=now_ns))
                case "deregister":
                    self._carry_out(self._directory.deregister(stream, now_ns=now_ns))
                    return
                case kind:
                    raise ProtocolError(f"a registered agent sent {kind!r}")

    def _answer(self, receiver: StreamState) -> pb.CoordinatorMessage:
        """To a heartbeat of an agent that lacks nothing."""
        receiver.revision = self._directory.revision
        update = pb.MembershipUpdate(
            epoch=self._directory.epoch,
            revision=receiver.told_revision,
            is_last=True,
            is_settled=self._directory.is_settled,
        )
        self._set_pace(update, receiver)
        return pb.CoordinatorMessage(membership=update)

    def _set_pace(self, update: pb.MembershipUpdate, receiver: StreamState) -> None:
        """Have an update tell an agent what is new of its heartbeats."""
        pace = self._directory.pace
        if receiver.pace is not pace and receiver.pace != pace:
            update.pace.CopyFrom(convert.write_pace(pace))
        receiver.pace = pace
        update.next_within_ms = pace.heartbeat_ms

    def _is_new_period(self, receiver: StreamState) -> bool:
        """Whether the receiver lacks the leg keys of now, which it is given then."""
        before, receiver.leg_period = receiver.leg_period, self._leg_keys.period
        return before != receiver.leg_period

    async def _push_to_agent(self, context: Any, ref: AgentRef, receiver: StreamState) -> None:
        """Send an agent the changes that it lacks, again and again: when it is woken, since its heartbeats are answered
        anyway.

        Returns when the coordinator stops; raises the error with which the stream is to end.
        """

        async def write(update: pb.MembershipUpdate) -> None:
            await context.write(pb.CoordinatorMessage(membership=update))

        def key_of(other: AgentRef) -> bytes:
            return session_key(self._root, ref, other)

        def finish(update: pb.MembershipUpdate) -> None:
            self._set_pace(update, receiver)
            if self._is_new_period(receiver) and receiver.subject.has_http:
                update.leg_keys.extend(self._leg_keys.accepted_by(ref))

        await self._keeper.catch_up()
        while True:
            async with receiver.writing:
                receiver.wake.clear()
                receiver.urgent.clear()
                if receiver.close_error is not None:
                    raise receiver.close_error
                if receiver.drain_reason is not None:
                    reason, receiver.drain_reason = receiver.drain_reason, None
                    await context.write(pb.CoordinatorMessage(drain=pb.DrainOrder(reason=reason)))
                await self._update(receiver, write, finish, key_of=key_of)
                if receiver.is_stopping:
                    await context.write(pb.CoordinatorMessage(stopping=pb.Stopping()))
                    return
            pushed_ns = self._clock.now_ns()
            await asyncio.sleep(PUSH_GAP_S)
            await receiver.wake.wait()
            left_s = self._gap_s() - (self._clock.now_ns() - pushed_ns) / NS_PER_S
            if left_s > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await receiver.urgent.wait()

    def _gap_s(self) -> float:
        """Between two updates to one agent. All that come back one by one, and are named by all, would else cost the
        square of their number."""
        return min(len(self._receivers.sessions) / PUSHES_A_S, self._directory.pace.heartbeat_ms / 2e3)

    async def _push_to_watcher(self, context: Any, receiver: StreamState) -> None:
        """As :meth:`_push_to_agent`, and at least once in each heartbeat interval, since a watcher says nothing."""
        heartbeat_s = self._config.heartbeat_s

        def finish(update: pb.MembershipUpdate) -> None:
            if self._is_new_period(receiver) and sends_legs(receiver.caller.identity):
                update.leg_secret = self._leg_keys.secret()

        await self._keeper.catch_up()
        while True:
            receiver.wake.clear()
            if receiver.close_error is not None:
                raise receiver.close_error
            await self._update(receiver, context.write, finish, next_within_ms=round(heartbeat_s * 1e3))
            if receiver.is_stopping:
                return
            await asyncio.sleep(PUSH_GAP_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(heartbeat_s):
                    await receiver.wake.wait()

    async def _update(
        self,
        receiver: StreamState,
        write: Callable[[pb.MembershipUpdate], Awaitable[None]],
        finish: Callable[[pb.MembershipUpdate], None],
        *,
        key_of: Callable[[AgentRef], bytes] | None = None,
        next_within_ms: int = 0,
    ) -> None:
        """Send one receiver the changes that it lacks. ``finish`` adds what the last part says beside them."""
        change = self._receivers.take(receiver)
        parts = convert.write_change(change, next_within_ms=next_within_ms, key_of=key_of, messages=self._messages)
        for part in parts:
            if part.is_last:
                finish(part)
            await write(part)

    def _carry_out(self, effects: tuple[Effect, ...]) -> None:
        """Do what the directory decided, then wake the streams that lack something."""
        for effect in effects:
            match effect:
                case IncarnationEnded(ref, cause):
                    self._messages.forget(ref.agent_id)
                    self._metrics.ended(cause.value)
                    log.info("%s is gone: %s", ref, cause.value)
                case CloseStream(stream, reason):
                    self._receivers.retire(stream, RefusedError(reason))
                case OrderDrain(stream, reason):
                    if (receiver := self._receivers.sessions.get(stream)) is not None:
                        receiver.drain_reason = reason
                        receiver.hurry()
        self._keeper.changed(effects)
        self._receivers.wake()


async def abort(context: Any, error: KvxferError) -> None:
    """End a call with the status and the stable code of ``error``."""
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    await context.abort(status, str(error)[:REASON_BYTES_MAX], trailing_metadata=((CODE_KEY, error.code),))
