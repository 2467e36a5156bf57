"""Calls to a cluster of etcd, over aetcd's stubs (the extra ``kvxfer[etcd]``; ADR 28). Decides which endpoint is asked;
must never know what a key is for.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import grpc
import grpc.aio

from kvxfer.coordinator.store.etcd_tls import EtcdFiles, EtcdProof
from kvxfer.errors import ConfigError, CoordinatorUnavailableError

CALL_S = 1.5
"""How long one endpoint may take for one call, before the next one is asked."""
RETIRED_S = 2 * CALL_S
"""So long a connection with former certificates ends its calls; a watch on it then begins anew on another one."""
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 4 << 20),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
)
"""A network that comes back must be noticed within a second or two. So no attempt to connect lasts longer than a
second, and a connection whose bytes nobody acknowledges for 2 s is closed (gRPC sets TCP_USER_TIMEOUT to the
keepalive's timeout): left to itself, TCP waits about as long again as it was cut off. etcd closes a connection whose
pings come less than 5 s apart."""


class EtcdLink:
    """Several endpoints of one etcd. The one that answered last is asked first; each has a channel of its own."""

    def __init__(self, endpoints: tuple[str, ...], files: EtcdFiles | None = None) -> None:
        """``endpoints``: ``host:port`` each. Without ``files`` there is no TLS."""
        self._endpoints = endpoints
        self._at = 0
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._files = files
        self._proof: EtcdProof | None = None
        self._proof_number = 0
        """Of what the channels were opened with."""
        self._retiring: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Raises ConfigError where aetcd is missing or cannot be loaded, or files are wrong. Contacts nothing."""
        rpc()
        if self._files is not None:
            self._proof = EtcdProof(self._files)

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)

    async def ask(self, stub: str, method: str, request: Any) -> Any:
        """A unary call, at one endpoint after the other. Raises CoordinatorUnavailableError if none answers. A call
        that failed may have had its effect."""
        reasons: list[str] = []
        for _ in self._endpoints:
            endpoint, channel = self._open()
            try:
                return await getattr(getattr(rpc(), stub)(channel), method)(request, timeout=CALL_S)
            except grpc.aio.AioRpcError as error:
                reasons.append(f"{endpoint}: {text_of(error)}")
                self._next(endpoint)
        raise CoordinatorUnavailableError(f"the store {self} does not answer ({'; '.join(reasons)})")

    async def keep_alive(self, lease: int) -> bool:
        """Renew a lease; whether it still was. Raises CoordinatorUnavailableError if no endpoint answers."""
        reasons: list[str] = []
        for _ in self._endpoints:
            endpoint, channel = self._open()
            call = rpc().LeaseStub(channel).LeaseKeepAlive(timeout=CALL_S)
            try:
                await call.write(rpc().LeaseKeepAliveRequest(ID=lease))
                answer = await call.read()
                if answer is not grpc.aio.EOF:  # type: ignore[attr-defined]
                    return bool(answer.TTL > 0)
                reasons.append(f"{endpoint}: {await call.details() or 'no answer'}")
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                reasons.append(f"{endpoint}: {text_of(error)}")
            finally:
                call.cancel()
            self._next(endpoint)
        raise CoordinatorUnavailableError(f"the store {self} renews no lease ({'; '.join(reasons)})")

    def watch(self, key: bytes, end: bytes, revision: int) -> Any:
        """The call that gives the changes of a range from ``revision`` on, at the endpoint that answered last, and
        the message that begins it."""
        create = rpc().WatchCreateRequest(key=key, range_end=end, start_revision=revision)
        return rpc().WatchStub(self._open()[1]).Watch(), rpc().WatchRequest(create_request=create)

    def _open(self) -> tuple[str, grpc.aio.Channel]:
        endpoint = self._endpoints[self._at]
        self._follow_files()
        if endpoint not in self._channels:
            self._channels[endpoint] = self._connected(endpoint)
        return endpoint, self._channels[endpoint]

    def _connected(self, endpoint: str) -> grpc.aio.Channel:
        """Its connection is made with the first call."""
        if self._proof is None:
            return grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(endpoint, self._proof.credentials, options=CHANNEL_OPTIONS)

    def _follow_files(self) -> None:
        """Leave the channels that were opened with former certificates."""
        if self._proof is None:
            return
        self._proof.look()
        if self._proof.number == self._proof_number:
            return
        self._proof_number = self._proof.number
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            task = asyncio.create_task(channel.close(RETIRED_S), name="kvxfer etcd channel")
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    def _next(self, failed: str) -> None:
        """Ask another one than ``failed``, unless another call went on already."""
        if self._endpoints[self._at] == failed:
            self._at = (self._at + 1) % len(self._endpoints)

    def __repr__(self) -> str:
        return f"etcd:{','.join(self._endpoints)}"


def rpc() -> Any:
    """aetcd's messages and stubs. Raises ConfigError."""
    try:
        return importlib.import_module("aetcd.rpc")
    except ImportError:
        raise ConfigError("a store in etcd needs aetcd: install it, or kvxfer with its extra etcd") from None
    except TypeError as error:  # protobuf refuses a second rpc.proto in one process
        raise ConfigError(f"aetcd cannot be loaded beside another client of etcd: {error}") from None


def text_of(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {(error.details() or '')[:200]}"
    return f"{type(error).__name__}: {error}"
