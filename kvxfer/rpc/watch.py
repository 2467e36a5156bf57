"""Membership for processes that are no agents: the router's live view, and the operator's single calls. Must never hold
a session key."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping

import grpc.aio

from kvxfer._pb import control_pb2 as pb
from kvxfer._pb import control_pb2_grpc
from kvxfer.errors import ClosedError, CoordinatorUnavailableError, KvxferError, OverloadedError
from kvxfer.patience import timeout_while_running
from kvxfer.protocol.mirror import Mirror
from kvxfer.rpc import convert
from kvxfer.rpc.link import (
    CONNECT_S,
    EOF,
    ReconnectBackoff,
    credentials,
    error_from_exception,
    open_channel,
    raise_status,
    tell,
    until_renewed,
)
from kvxfer.rpc.targets import Targets
from kvxfer.trust.files import FollowedFiles
from kvxfer.types import Membership

log = logging.getLogger("kvxfer.rpc")

SILENCE_FACTOR = 3
"""A coordinator that is silent for so many times what it promised counts as lost."""
SILENCE_MAX_S = 60.0


class MembershipWatch:
    """An async context manager; inside it :attr:`membership` is the newest view known, connected or not. A new
    :attr:`leg_secret` counts as a new view.

    A lost coordinator changes nothing but :attr:`is_connected`: the last view stays, and the watch comes back for ever.
    """

    def __init__(
        self,
        target: str,
        token: bytes,
        *,
        on_membership: Callable[[Membership], None] | None = None,
        on_state: Callable[[bool], None] | None = None,
        source: random.Random | None = None,
        tls: FollowedFiles | None = None,
    ) -> None:
        """``target`` is ``host:port``, or several with commas between: any serves, and the next is tried on a loss.
        With ``tls`` the token may be empty.

        The callbacks run on the loop that started the watch.
        """
        source = source or random.Random()
        self._targets = Targets(target, source)
        self._metadata = credentials(token)
        self._tls = tls
        self._on_membership = on_membership
        self._on_state = on_state
        self._backoff = ReconnectBackoff(source)
        self._mirror = Mirror()
        self._task: asyncio.Task[None] | None = None
        self._is_connected = False
        self._last_error: KvxferError | None = None
        self._changed: asyncio.Future[None] | None = None
        self._readers: set[_Reader] = set()
        self.leg_secret = b""
        """From which the keys of legs follow (:mod:`kvxfer.protocol.leg_keys`). Empty: this watcher is given none."""

    @property
    def membership(self) -> Membership:
        """The newest view, with ``gone`` empty; empty before the first."""
        return self._mirror.membership

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    @property
    def last_error(self) -> KvxferError | None:
        """Why the last attempt ended; ``None`` while connected."""
        return self._last_error

    def start(self) -> None:
        """Begin in the background; does not wait for the coordinator."""
        if self._task is not None:
            raise ClosedError("a membership watch starts once")
        self._task = asyncio.create_task(self._run(), name="kvxfer membership watch")

    async def wait_connected(self, timeout_s: float = 30.0) -> Membership:
        """The view, as soon as the coordinator gave one.

        Raises CoordinatorUnavailableError after ``timeout_s``, and AuthenticationError or ProtocolError at once.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_connected:
                    error = self._last_error
                    if error is not None and not isinstance(error, (CoordinatorUnavailableError, OverloadedError)):
                        raise error
                    if self._changed is None:
                        self._changed = asyncio.get_running_loop().create_future()
                    await asyncio.shield(self._changed)
        except TimeoutError:
            raise CoordinatorUnavailableError(
                f"{self._last_error or 'no answer yet'} (tried for {timeout_s:g} s)"
            ) from None
        return self.membership

    async def changes(self) -> AsyncIterator[Membership]:
        """Yield the view now and after each change.

        A slow reader gets the newest view, with ``gone`` of all it missed.
        """
        reader = _Reader(self._mirror.membership if self._is_connected else None)
        self._readers.add(reader)
        try:
            while True:
                yield await reader.take()
        finally:
            self._readers.discard(reader)

    async def close(self) -> None:
        """End. Callable twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def __aenter__(self) -> MembershipWatch:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = "connected" if self._is_connected else f"disconnected ({self._last_error})"
        return f"<MembershipWatch of {self._targets}, {state}, revision {self.membership.revision}>"

    async def _run(self) -> None:
        while True:
            try:
                async with open_channel(self._targets.now, self._tls) as channel:
                    await until_renewed(self._tls, self._follow(channel))
            except Exception as error:
                failure = error_from_exception(self._targets.now, error)
                if str(failure) != str(self._last_error):
                    log.warning("membership watch: %s", failure)
                self._last_error = failure
            finally:
                self._connected(False)
                self._mirror.reset_parts()
            self._targets.lost()
            await asyncio.sleep(self._backoff.next_s())

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        """One stream, to its end, which is always an error."""
        stub = control_pb2_grpc.CoordinatorStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Watch(pb.WatchRequest(protocol_version=convert.PROTOCOL_VERSION), metadata=self._metadata)
        silence_s = CONNECT_S
        try:
            while True:
                async with timeout_while_running(silence_s):
                    update = await call.read()
                if update is EOF:
                    await raise_status(self._targets.now, call)
                secret = convert.read_leg_secret(update)
                membership = self._mirror.apply(convert.read_change(update), is_last=update.is_last)
                if secret not in (b"", self.leg_secret):
                    self.leg_secret = secret
                    membership = membership or self._mirror.membership
                silence_s = min(max(SILENCE_FACTOR * update.next_within_ms / 1e3, 1.0), SILENCE_MAX_S)
                if membership is not None:
                    self._publish(membership)
                if update.is_last and not self._is_connected:
                    self._last_error = None
                    self._backoff.reset()
                    self._connected(True)
        finally:
            call.cancel()

    def _publish(self, membership: Membership) -> None:
        for reader in self._readers:
            reader.put(membership)
        tell(self._on_membership, membership)

    def _connected(self, is_connected: bool) -> None:
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None
        if self._is_connected != is_connected:
            self._is_connected = is_connected
            tell(self._on_state, is_connected)


class _Reader:
    """One place for one view: a newer view replaces an older one that was not taken, and keeps its ``gone``."""

    def __init__(self, first: Membership | None) -> None:
        self._view = first
        self._ready = asyncio.Event()
        if first is not None:
            self._ready.set()

    def put(self, view: Membership) -> None:
        if self._view is not None:
            view = dataclasses.replace(view, gone=tuple(dict.fromkeys(self._view.gone + view.gone)))
        self._view = view
        self._ready.set()

    async def take(self) -> Membership:
        while self._view is None:
            self._ready.clear()
            await self._ready.wait()
        view, self._view = self._view, None
        return view


async def list_members(
    target: str, token: bytes, *, timeout_s: float = CONNECT_S, tls: FollowedFiles | None = None
) -> Membership:
    """The whole membership, once. Raises AuthenticationError, ForbiddenError or CoordinatorUnavailableError."""
    async with MembershipWatch(target, token, tls=tls) as watch:
        return await watch.wait_connected(timeout_s)


async def drain(
    target: str,
    token: bytes,
    agent_id: str,
    *,
    reason: str = "",
    timeout_s: float = CONNECT_S,
    tls: FollowedFiles | None = None,
) -> None:
    """Order an agent to take no new work; asks each of several coordinators until one answers. Raises RefusedError if
    there is no such member, and ForbiddenError.
    """
    targets = Targets(target)
    request = pb.DrainRequest(agent_id=agent_id, reason=reason)
    for left in reversed(range(len(targets))):
        async with open_channel(targets.now, tls) as channel:
            stub = control_pb2_grpc.CoordinatorStub(channel)  # type: ignore[no-untyped-call]
            try:
                await stub.Drain(request, metadata=credentials(token), timeout=timeout_s)
                return
            except grpc.aio.AioRpcError as error:
                failure = error_from_exception(targets.now, error)
                if left == 0 or not isinstance(failure, CoordinatorUnavailableError):
                    raise failure from None
        targets.lost()


async def acquaint(
    target: str,
    token: bytes,
    others: Mapping[str, Collection[str]],
    *,
    timeout_s: float = CONNECT_S,
    tls: FollowedFiles | None = None,
) -> frozenset[str]:
    """From one coordinator to another: tell each of these agents of ``others`` that named it. Returns the agents that
    have no session there. Raises CoordinatorUnavailableError, AuthenticationError, ForbiddenError."""
    async with open_channel(target, tls) as channel:
        stub = control_pb2_grpc.CoordinatorStub(channel)  # type: ignore[no-untyped-call]
        request = convert.write_acquaintances(others)
        try:
            answer = await stub.Acquaint(request, metadata=credentials(token), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_exception(target, error) from None
    return frozenset(answer.absent)
