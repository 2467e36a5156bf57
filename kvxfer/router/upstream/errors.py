"""What can go wrong between the router and one engine, each with the engine's address and the phase.

::

    UpstreamError                    (of TransportError)
    ├── UpstreamBusyError            all connections are taken and the queue for them is full
    ├── UpstreamConnectError         no connection came about
    ├── UpstreamTimeoutError         the deadline of ``phase`` passed
    ├── UpstreamProtocolError        the engine sent bytes that are no answer, or passed a bound
    │   └── UpstreamTooLargeError    the answer is longer than its reader allows
    ├── UpstreamClosedError          the connection ended before the answer did
    │   └── UpstreamUnprocessedError ... and the engine cannot have processed the request: a retry repeats nothing
    └── UpstreamAbortedError         the router itself gave the request up
    UpstreamRequestError             (of InvalidArgumentError) the request cannot be sent as it is: nothing was sent

It decides how failures are named. It must never know what a failure means to a client, or whether to try again.
"""

from __future__ import annotations

from kvxfer.errors import InvalidArgumentError, TransportError
from kvxfer.router.upstream.limits import UpstreamPhase


class UpstreamError(TransportError):
    """A request to the engine at ``address`` failed in ``phase``."""

    def __init__(self, message: str, *, address: str, phase: UpstreamPhase) -> None:
        super().__init__(f"engine {address}, {phase}: {message}")
        self.address = address
        self.phase = phase


class UpstreamBusyError(UpstreamError):
    pass


class UpstreamConnectError(UpstreamError):
    pass


class UpstreamTimeoutError(UpstreamError):
    pass


class UpstreamProtocolError(UpstreamError):
    pass


class UpstreamTooLargeError(UpstreamProtocolError):
    pass


class UpstreamClosedError(UpstreamError):
    pass


class UpstreamUnprocessedError(UpstreamClosedError):
    """The engine closed a kept connection and did not take the whole request.

    Either some bytes never left this process, or the engine's kernel closed the connection without an
    acknowledgement of the last bytes.
    """


class UpstreamAbortedError(UpstreamError):
    pass


class UpstreamRequestError(InvalidArgumentError):
    pass
