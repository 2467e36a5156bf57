"""The router's own client of engines: HTTP/1.1 over kept connections, on ``httptools`` and ``asyncio`` protocols.

::

    pool = UpstreamPool("http://10.0.0.7:8000", UpstreamLimits(connections_max=512))
    async with await pool.request("POST", "/v1/completions", headers, [first, rest], deadlines) as response:
        if response.status == 200:
            await response.pipe(transport_of_the_client.write)
    await pool.close()

The room decides how bytes reach one engine and come back. It must never know dialects, workers, retries, or the
client's HTTP server; it imports no other room of the router. Files, lowest first: ``limits``, ``errors``, ``head``
(a request's head), ``parser`` (an answer from bytes, pure), ``response`` (the consumer's end), ``connection``,
``pool``, ``tls``.
"""

from kvxfer.router.upstream.errors import (
    UpstreamAbortedError,
    UpstreamBusyError,
    UpstreamClosedError,
    UpstreamConnectError,
    UpstreamError,
    UpstreamProtocolError,
    UpstreamRequestError,
    UpstreamTimeoutError,
    UpstreamTooLargeError,
    UpstreamUnprocessedError,
)
from kvxfer.router.upstream.limits import (
    Patience,
    UpstreamCounters,
    UpstreamDeadlines,
    UpstreamLimits,
    UpstreamPhase,
)
from kvxfer.router.upstream.pool import UpstreamPool
from kvxfer.router.upstream.response import UpstreamResponse
from kvxfer.router.upstream.tls import WorkerPools

__all__ = [
    "Patience",
    "UpstreamAbortedError",
    "UpstreamBusyError",
    "UpstreamClosedError",
    "UpstreamConnectError",
    "UpstreamCounters",
    "UpstreamDeadlines",
    "UpstreamError",
    "UpstreamLimits",
    "UpstreamPhase",
    "UpstreamPool",
    "UpstreamProtocolError",
    "UpstreamRequestError",
    "UpstreamResponse",
    "UpstreamTimeoutError",
    "UpstreamTooLargeError",
    "UpstreamUnprocessedError",
    "WorkerPools",
]
