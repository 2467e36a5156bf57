"""One agent's session with the coordinator: registers, heartbeats, hands membership up, and comes back for ever.
Decides when a connection counts as lost; must never know what the agent does with a membership.

What the owner may conclude: while :attr:`CoordinatorSession.is_connected` is false, the last membership is all there
is, and nothing in it has been judged since. The agent keeps serving what it has granted (fail static). It never gets
another incarnation: the pair given at the first registration is shown again each time, so a restart of the coordinator
is invisible to peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

import grpc.aio

from kvxfer._pb import control_pb2 as pb
from kvxfer._pb import control_pb2_grpc
from kvxfer.errors import (
    AuthenticationError,
    ClosedError,
    CoordinatorUnavailableError,
    ForbiddenError,
    KvxferError,
    MembershipEndedError,
    OverloadedError,
    ProtocolError,
    RefusedError,
)
from kvxfer.patience import timeout_while_running
from kvxfer.protocol.directory import Hello
from kvxfer.protocol.mirror import Mirror
from kvxfer.protocol.pace import ToldPace
from kvxfer.rpc import convert
from kvxfer.rpc.convert import ASK_NAMES_MAX, NAMES_MAX
from kvxfer.rpc.link import (
    CONNECT_S,
    EOF,
    REASON_BYTES_MAX,
    ReconnectBackoff,
    both_ways,
    credentials,
    error_from_exception,
    open_channel,
    raise_status,
    tell,
    until_renewed,
)
from kvxfer.rpc.targets import Targets
from kvxfer.trust.files import FollowedFiles
from kvxfer.types import AgentRef, DataAddress, Load, Membership, PoolRecord, WorkerInfo

log = logging.getLogger("kvxfer.rpc")

LEAVE_S = 2.0
"""How long :meth:`CoordinatorSession.close` waits for the goodbye to be heard."""


class CoordinatorSession:
    """Runs on one asyncio loop, which calls the callbacks; methods say which of them may be called from any thread."""

    def __init__(
        self,
        target: str,
        token: bytes,
        boot_nonce: bytes,
        info: WorkerInfo,
        address: DataAddress,
        pools: Iterable[PoolRecord] = (),
        *,
        on_membership: Callable[[Membership], None],
        on_state: Callable[[bool], None] | None = None,
        on_drain: Callable[[str], None] | None = None,
        source: random.Random | None = None,
        tls: FollowedFiles | None = None,
    ) -> None:
        """``target`` is ``host:port``, or several with commas between: any serves, and the next is tried on a loss.
        With ``tls`` the certificate says who the agent is, and ``token`` may be empty.

        ``source`` jitters the waits between attempts. Raises InvalidArgumentError for anything that the wire cannot
        carry.
        """
        source = source or random.Random()
        self._targets = Targets(target, source)
        self._metadata = credentials(token)
        self._tls = tls
        self._hello = Hello(info, address, boot_nonce, pools=tuple(pools))
        convert.write_hello(self._hello)
        self._on_membership = on_membership
        self._on_state = on_state
        self._on_drain = on_drain
        self._source = source
        self._backoff = ReconnectBackoff(source)
        self._pace = ToldPace(1, 1)
        self._asked: set[str] = set()
        """The agents that the owner looked for."""
        self._asks: list[str] = []
        """Those of them that the coordinator was not told of in this session."""
        self._mirror = Mirror()
        self._load = Load()
        self._is_draining = False
        self._pools_changed = False
        self._wake = asyncio.Event()
        self._leaving = False
        self._ref: AgentRef | None = None
        self._registered: asyncio.Future[AgentRef] | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_connected = False
        self._attempts = 0
        self._heartbeats = 0
        self._last_error: KvxferError | None = None
        self._own_end: MembershipEndedError | None = None
        self._leg_keys: tuple[bytes, ...] = ()

    async def start(self, timeout_s: float = 30.0) -> AgentRef:
        """Register, trying again while the coordinator cannot be reached; returns the agent's full name.

        Raises CoordinatorUnavailableError after ``timeout_s``, and at once: AuthenticationError, ForbiddenError,
        RefusedError (the agent id is in use), ProtocolError. After an error the session is closed.
        """
        if self._task is not None or self._leaving:
            raise ClosedError("a coordinator session starts once")
        self._registered = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="kvxfer coordinator session")
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._registered)
        except TimeoutError:
            await self._stop()
            cause = self._last_error or CoordinatorUnavailableError(f"coordinator {self._targets.now} did not answer")
            raise CoordinatorUnavailableError(f"{cause} (tried for {timeout_s:g} s)") from None
        except BaseException:
            await self._stop()
            raise

    @property
    def ref(self) -> AgentRef:
        """The agent's full name; raises ClosedError before :meth:`start` returned."""
        if self._ref is None:
            raise ClosedError("the agent is not registered yet")
        return self._ref

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    @property
    def is_draining(self) -> bool:
        """Whether this agent takes no new work: :meth:`set_draining` was called, or the coordinator ordered so."""
        return self._is_draining

    @property
    def membership(self) -> Membership:
        """The last view, with ``gone`` empty."""
        return self._mirror.membership

    @property
    def heartbeat_s(self) -> float:
        """The interval that the coordinator told last."""
        return self._pace.heartbeat_ms / 1e3

    @property
    def heartbeats(self) -> int:
        """How many were sent, over all connections."""
        return self._heartbeats

    @property
    def last_error(self) -> KvxferError | None:
        """Why the last attempt ended; ``None`` while connected."""
        return self._last_error

    @property
    def own_end(self) -> MembershipEndedError | None:
        """That the coordinator has this agent as a member no longer, as it said last; ``None`` while it is one, or
        nothing is known but that the coordinator is out of reach."""
        return self._own_end

    @property
    def leg_keys(self) -> tuple[bytes, ...]:
        """Those that routers may show to this worker's HTTP port, as they were given last; after a change of all keys
        also those of before. None before :meth:`start` returned, of an agent without HTTP, and of a coordinator that
        gives none."""
        return self._leg_keys

    def set_load(self, load: Load) -> None:
        """What the next heartbeat says. Callable from any thread."""
        self._load = load

    def set_pools(self, pools: Iterable[PoolRecord]) -> None:
        """Publish the whole list of pools, at once. Callable from any thread. Raises InvalidArgumentError for what the
        wire cannot carry."""
        pools = tuple(pools)
        convert.write_pools(pools)
        self._hello = Hello(self._hello.info, self._hello.address, self._hello.boot_nonce, pools=pools)
        self._pools_changed = True
        self._wake_soon(self._wake.set)

    def ask(self, agent_id: str) -> None:
        """Have the coordinator tell of an agent, and that agent of us: in a big cluster it tells of no others.
        Callable from any thread; once for each agent is enough."""
        if agent_id not in self._asked:
            self._wake_soon(lambda: self._ask(agent_id))

    def _ask(self, agent_id: str) -> None:
        if agent_id not in self._asked:
            if len(self._asked) >= NAMES_MAX:
                self._asked.clear()  # those of them that came are members, and known by that
            self._asked.add(agent_id)
            self._asks.append(agent_id)
            self._wake.set()

    def _wake_soon(self, act: Callable[[], None]) -> None:
        if self._task is None:
            act()
        else:
            with contextlib.suppress(RuntimeError):  # that loop has ended, and no callback is called any more
                self._task.get_loop().call_soon_threadsafe(act)

    def set_draining(self) -> None:
        """Say at once that this agent takes no new work; stays so for this incarnation."""
        self._is_draining = True
        self._wake.set()

    async def close(self) -> None:
        """Deregister, if the coordinator listens, and end. Callable twice."""
        if self._task is None or self._leaving:
            self._leaving = True
            return
        self._leaving = True
        self._wake.set()
        if self._is_connected:
            await asyncio.wait([self._task], timeout=LEAVE_S)
        await self._stop()

    async def __aenter__(self) -> CoordinatorSession:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = "connected" if self._is_connected else f"disconnected ({self._last_error})"
        return f"<CoordinatorSession {self._ref or self._hello.info.agent_id} at {self._targets.now}, {state}>"

    async def _stop(self) -> None:
        self._leaving = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._connected(False)

    async def _run(self) -> None:
        while not self._leaving:
            self._attempts += 1
            try:
                async with open_channel(self._targets.now, self._tls) as channel:
                    await until_renewed(self._tls, self._converse(channel))
            except Exception as error:
                self._failed(error_from_exception(self._targets.now, error))
                if self._registered is not None and self._registered.done() and self._ref is None:
                    return
            finally:
                self._connected(False)
                self._mirror.reset_parts()
            self._targets.lost()
            if not self._leaving:
                await asyncio.sleep(self._backoff.next_s())

    def _failed(self, error: KvxferError) -> None:
        if str(error) != str(self._last_error) and not self._leaving:
            log.warning("%s: %s", self._hello.info.agent_id, error)
        self._last_error = error
        if self._ref is not None and isinstance(error, (AuthenticationError, ForbiddenError, RefusedError)):
            self._own_end = MembershipEndedError(f"this agent, {self._ref}, is no member any more: {error}")
        passing = isinstance(error, (CoordinatorUnavailableError, OverloadedError))
        if self._ref is None and not passing and self._registered is not None and not self._registered.done():
            self._registered.set_exception(error)

    def _connected(self, is_connected: bool) -> None:
        if self._is_connected != is_connected:
            self._is_connected = is_connected
            tell(self._on_state, is_connected)

    async def _converse(self, channel: grpc.aio.Channel) -> None:
        """One stream, from Register to its end. Raises whatever ended it, unless we left."""
        stub = control_pb2_grpc.CoordinatorStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Session(metadata=self._metadata)
        try:
            welcome = await self._register(call)
            self._set_pace(convert.read_pace(welcome))
            await both_ways(self._send(call), self._receive(call))
        finally:
            call.cancel()

    async def _register(self, call: Any) -> pb.Welcome:
        number = 0 if self._ref is None else self._ref.incarnation.number
        self._pools_changed = False  # before they are read: they may be replaced from another thread meanwhile
        hello = Hello(
            self._hello.info,
            self._hello.address,
            self._hello.boot_nonce,
            number,
            self._hello.pools,
            self._load,
            self._is_draining,
            self._attempts,
            self._known(),
            self._pace.return_within_ms,
        )
        self._asks.clear()
        async with asyncio.timeout(self._answer_s()):
            with contextlib.suppress(asyncio.InvalidStateError):
                await call.write(pb.AgentMessage(register=convert.write_hello(hello)))
            message = await call.read()
        if message is EOF:
            await raise_status(self._targets.now, call)
        if message.WhichOneof("kind") != "welcome":
            raise ProtocolError(
                f"coordinator {self._targets.now} answered {message.WhichOneof('kind')!r} to a registration"
            )
        ref = convert.read_ref(message.welcome.ref)
        if (ref.agent_id, ref.incarnation.boot_nonce) != (
            self._hello.info.agent_id,
            self._hello.boot_nonce,
        ) or self._ref not in (None, ref):
            raise ProtocolError(
                f"coordinator {self._targets.now} calls this agent {ref}, not {self._ref or self._hello.info.agent_id}"
            )
        self._keep_leg_keys(convert.read_leg_keys(message.welcome))
        self._ref = ref
        self._last_error = self._own_end = None
        self._backoff.reset()
        self._connected(True)
        if self._registered is not None and not self._registered.done():
            self._registered.set_result(ref)
        return message.welcome  # type: ignore[no-any-return]

    def _keep_leg_keys(self, given: tuple[bytes, ...]) -> None:
        """What is given in a period has the keys of the last and of the next one in it. So nothing else is kept, and a
        key counts until the end of the period after its own. Where none of them was given before, this is a coordinator
        with other keys, of which a router may hear later than this agent: the keys of before stay until others come."""
        before = self._leg_keys[: len(given)]
        if given and given != before:
            self._leg_keys = given + before if set(given).isdisjoint(before) else given

    def _known(self) -> tuple[str, ...]:
        """The agents that a coordinator must tell of, so that an absence means that they are gone."""
        members = (member.ref.agent_id for member in self._mirror.membership.members)
        return tuple(dict.fromkeys((*members, *sorted(self._asked))))[:NAMES_MAX]

    def _set_pace(self, pace: ToldPace) -> None:
        """From now on this is how often to give a heartbeat; where that is sooner than before, one is due now."""
        if pace.heartbeat_ms < self._pace.heartbeat_ms:
            self._wake.set()
        self._pace = pace
        self._backoff.spread(pace.return_within_ms / 1e3)

    def _patience_s(self, *, is_first: bool) -> float:
        """How long the coordinator may be silent, as it was told last. The first view may take the whole time in which
        silence means death: the coordinator may ask its store for it."""
        return self._pace.patience_s(has_other=len(self._targets) > 1 and not is_first)

    def _answer_s(self) -> float:
        """How long a registration may take. A coordinator to which all agents come back is slow, and one that gives up
        and comes again makes it slower; where there is another one, that one may be faster."""
        return CONNECT_S if len(self._targets) > 1 else max(CONNECT_S, self._pace.patience_s(has_other=False))

    async def _send(self, call: Any) -> None:
        wait_s = self._pace.heartbeat_ms / 1e3 * self._source.random()  # those that came together do not stay together
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            wait_s = self._pace.heartbeat_ms / 1e3
            self._wake.clear()
            if self._leaving:
                await call.write(pb.AgentMessage(deregister=pb.Deregister()))
                await call.done_writing()
                return
            if self._pools_changed:
                self._pools_changed = False
                await call.write(
                    pb.AgentMessage(update_pools=pb.UpdatePools(pools=convert.write_pools(self._hello.pools)))
                )
            if self._asks:
                asks, self._asks = self._asks[:ASK_NAMES_MAX], self._asks[ASK_NAMES_MAX:]
                await call.write(pb.AgentMessage(ask=pb.Ask(agent_ids=asks)))
                if self._asks:
                    self._wake.set()
            beat = pb.Heartbeat(
                load=convert.write_load(self._load),
                is_draining=self._is_draining,
                next_within_ms=self._pace.heartbeat_ms,
            )
            await call.write(pb.AgentMessage(heartbeat=beat))
            self._heartbeats += 1

    async def _receive(self, call: Any) -> None:
        is_first = True
        while True:
            async with timeout_while_running(self._patience_s(is_first=is_first)):
                message = await call.read()
            is_first = False
            if message is EOF:
                if self._leaving:
                    return
                await raise_status(self._targets.now, call)
            match message.WhichOneof("kind"):
                case "membership":
                    self._keep_leg_keys(convert.read_leg_keys(message.membership))
                    if message.membership.HasField("pace"):
                        self._set_pace(convert.read_pace(message.membership.pace))
                    membership = self._mirror.apply(
                        convert.read_change(message.membership), is_last=message.membership.is_last
                    )
                    if membership is not None:
                        tell(self._on_membership, membership)
                case "drain":
                    self._is_draining = True
                    tell(self._on_drain, message.drain.reason[:REASON_BYTES_MAX])
                case "stopping":
                    raise CoordinatorUnavailableError(f"coordinator {self._targets.now} is stopping")
                case kind:
                    raise ProtocolError(f"coordinator {self._targets.now} sent {kind!r} inside a session")
