"""The standard gRPC health service (grpc.health.v1) for one server. Decides only what is said; needs no token, because
probes have none.

The service answers with messages of its own (protos/kvxfer/_pb/health.proto) that have the same encoding as the
standard ones. So kvxfer needs no grpcio-health-checking, whose generated code would narrow the protobuf versions that
kvxfer runs on, and registers ``grpc.health.v1`` no second time in a process that has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from kvxfer._pb import health_pb2 as pb

HEALTH_SERVICE = "grpc.health.v1.Health"
SERVING = pb.HealthResponse.SERVING
NOT_SERVING = pb.HealthResponse.NOT_SERVING
SERVICE_UNKNOWN = pb.HealthResponse.SERVICE_UNKNOWN


WATCHES_MAX = 32
"""Each takes the place of another call, and asks for no token."""


class Health:
    """One status for the whole server (the empty name) and for each named service."""

    def __init__(self, *services: str) -> None:
        self._status = dict.fromkeys(("", *services), NOT_SERVING)
        self._changed = asyncio.Event()
        self._watches = 0

    def set_serving(self, is_serving: bool) -> None:
        """Change all names at once and tell the watchers."""
        self._status = dict.fromkeys(self._status, SERVING if is_serving else NOT_SERVING)
        self._changed.set()
        self._changed = asyncio.Event()

    def handler(self) -> grpc.GenericRpcHandler:  # type: ignore[type-arg]
        """What a server adds to its handlers."""
        both: dict[str, Any] = {
            "request_deserializer": pb.HealthRequest.FromString,
            "response_serializer": pb.HealthResponse.SerializeToString,
        }
        return grpc.method_handlers_generic_handler(
            HEALTH_SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check, **both),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch, **both),
            },
        )

    async def _check(self, request: pb.HealthRequest, context: Any) -> pb.HealthResponse:
        status = self._status.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return pb.HealthResponse(status=status)

    async def _watch(self, request: pb.HealthRequest, context: Any) -> AsyncIterator[pb.HealthResponse]:
        if self._watches >= WATCHES_MAX:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"there are {WATCHES_MAX} watches; use Check")
        self._watches += 1
        try:
            said = None
            while True:
                changed = self._changed
                status = self._status.get(request.service, SERVICE_UNKNOWN)
                if status != said:
                    said = status
                    yield pb.HealthResponse(status=status)
                await changed.wait()
        finally:
            self._watches -= 1
