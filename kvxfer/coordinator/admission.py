"""How an agent is let in: its Hello is read, its number comes from the store, the directory and the store know it, and
its stream is among the receivers.

Decides in which order, and that an agent whose caller is revoked meanwhile is not in. It must never know what is said
on a stream after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from kvxfer.clock import Clock
from kvxfer.coordinator.gate import Caller, Gate
from kvxfer.coordinator.hosts import RegisteredHosts
from kvxfer.coordinator.keeper import StoreKeeper
from kvxfer.coordinator.metrics import CoordinatorMetrics
from kvxfer.coordinator.receivers import Receivers, StreamState
from kvxfer.errors import KvxferError, OverloadedError, ProtocolError, RefusedError
from kvxfer.protocol.directory import Directory, Effect, Hello, Registration
from kvxfer.rpc import convert
from kvxfer.rpc.link import EOF
from kvxfer.trust.identity import CertIdentity
from kvxfer.trust.permissions import ControlCall, Subject

log = logging.getLogger("kvxfer.coordinator")

HELLO_S = 5.0
"""How long a stream may take to register."""
AGENTS_OF_ONE_MAX = 1024
"""Members for which one certificate's name may speak, such as the ranks of an engine: one holder never takes all the
places of ``members_max``. The holder of the cluster token may."""
ORDERED_BEFORE = "ordered before this agent came back"


class AgentAdmission:
    """Of one coordinator. ``carry_out`` does what the directory decides; ``check_open`` raises a KvxferError while no
    agent is let in."""

    def __init__(
        self,
        directory: Directory,
        keeper: StoreKeeper,
        receivers: Receivers,
        gate: Gate,
        hosts: RegisteredHosts,
        clock: Clock,
        metrics: CoordinatorMetrics,
        *,
        carry_out: Callable[[tuple[Effect, ...]], None],
        check_open: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._keeper = keeper
        self._receivers = receivers
        self._gate = gate
        self._hosts = hosts
        self._clock = clock
        self._metrics = metrics
        self._carry_out = carry_out
        self._check_open = check_open
        self._names: dict[CertIdentity, set[str]] = {}
        """The agents that each holder of a certificate registered; those that are over are taken out at the bound."""

    async def admit(self, context: Any, caller: Caller) -> tuple[Registration, StreamState]:
        """Let in the agent behind gRPC's ``context``, whose first message is its Hello. Raises what says why not."""
        try:
            async with asyncio.timeout(HELLO_S):
                message = await read(context)
        except TimeoutError:
            raise ProtocolError(f"no registration within {HELLO_S:g} s") from None
        if message is EOF or message.WhichOneof("kind") != "register":
            raise ProtocolError("the first message of a session must register")
        try:
            hello = convert.read_hello(message.register)
            subject = Subject(hello.info.agent_id, hello.info.role, bool(hello.info.http_url))
            with self._gate.audited(caller, ControlCall.REGISTER, subject):
                registration = await self._register(hello, context, caller)
        except KvxferError as error:
            self._metrics.registered(error.code)
            log.warning("refused a registration: %s", error)
            raise
        self._metrics.registered("return" if registration.is_return else "new")
        log.info("%s %s", registration.ref, "is back" if registration.is_return else "registered")
        receiver = StreamState(caller, subject)
        self._receivers.open(registration.stream, receiver, hello.known)
        known = self._directory.known(registration.ref.agent_id)
        if known is not None and known[0].is_draining and not hello.is_draining:
            receiver.drain_reason = ORDERED_BEFORE
        return registration, receiver

    def withdraw(self, stream: int) -> None:
        """End the incarnation that a stream speaks for, if it still speaks for one."""
        with contextlib.suppress(RefusedError):
            self._carry_out(self._directory.deregister(stream, now_ns=self._clock.now_ns()))

    async def _register(self, hello: Hello, context: Any, caller: Caller) -> Registration:
        self._hosts.check(hello, context.peer())
        self._check_count(caller, hello.info.agent_id)
        fresh_number = None
        if hello.number:
            await self._keeper.admit_number(hello.number)
        else:
            fresh_number = await self._keeper.next_number()
        self._check_open()
        self._gate.check_revoked(caller)
        registration = self._directory.register(hello, fresh_number=fresh_number, now_ns=self._clock.now_ns())
        self._carry_out(registration.effects)
        if fresh_number is not None:
            await self._keep(registration, hello, caller)
        return registration

    def _check_count(self, caller: Caller, agent_id: str) -> None:
        """Raise OverloadedError where the holder of this certificate has AGENTS_OF_ONE_MAX other members."""
        if caller.identity is None:
            return
        names = self._names.setdefault(caller.identity, set())
        if len(names) >= AGENTS_OF_ONE_MAX and agent_id not in names:
            names.intersection_update([name for name in names if self._directory.known(name) is not None])
            if len(names) >= AGENTS_OF_ONE_MAX:
                raise OverloadedError(
                    f"{caller.identity} has AGENTS_OF_ONE_MAX={AGENTS_OF_ONE_MAX} members already, the most of one name"
                )
        names.add(agent_id)

    async def _keep(self, registration: Registration, hello: Hello, caller: Caller) -> None:
        """Have the store know a new incarnation before its agent does. Raises CoordinatorUnavailableError, and
        RefusedError where the agent came again meanwhile, so that another stream speaks for it."""
        try:
            await self._keeper.keep(registration.ref.agent_id)
            self._gate.check_revoked(caller)
        except BaseException:
            self.withdraw(registration.stream)
            raise
        beat = self._directory.heartbeat(
            registration.stream,
            hello.load,
            is_draining=hello.is_draining,
            now_ns=self._clock.now_ns(),
            promised_ms=registration.pace.heartbeat_ms,
        )
        self._carry_out(beat)


async def read(context: Any) -> Any:
    """The next message or EOF; ProtocolError for bytes that are no message."""
    try:
        return await context.read()
    except DecodeError:
        raise ProtocolError("bytes that are no AgentMessage") from None
