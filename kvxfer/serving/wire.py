"""HTTP/1.1 as our servers read it: h11's grammar, without what two readers may understand differently.

Decides which requests are malformed and when a connection cannot go on after an answer. It must never know a socket.
"""

from __future__ import annotations

import h11

HEAD_BYTES_MAX = 16 << 10
"""Longest head of a request (request line and fields)."""
BAD_REQUEST = 400
TOO_LARGE = 431


class Wire(h11.Connection):
    """The server's end of one connection."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES_MAX)
        self.refused: tuple[int, str] = (BAD_REQUEST, "the request is not HTTP/1.1")
        """Status and reason of the last request that was malformed."""

    @property
    def awaits_body(self) -> bool:
        """Whether the client may still be sending the request that was read last."""
        return self.their_state in (h11.SEND_BODY, h11.ERROR)

    @property
    def has_partial_head(self) -> bool:
        """Whether some of the next request's head is here."""
        return self.their_state is h11.IDLE and bool(self.trailing_data[0])

    @property
    def can_answer(self) -> bool:
        """Whether an answer's head may be sent now."""
        return self.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """As h11's; raises h11.RemoteProtocolError for a request whose length can be read in two ways, too.

        A body that is said to have both a length and chunks is how one connection's bytes become another one's request
        (RFC 9112, section 6.3, asks a server to close); HTTP/1.0 has no chunks.
        """
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                names = {name for name, _ in event.headers}
                if b"transfer-encoding" in names and b"content-length" in names:
                    raise h11.RemoteProtocolError("the request has both content-length and transfer-encoding")
                if _size(event) > HEAD_BYTES_MAX:
                    raise h11.RemoteProtocolError(f"the request's head exceeds {HEAD_BYTES_MAX} bytes", TOO_LARGE)
                if b"transfer-encoding" in names and event.http_version < b"1.1":
                    raise h11.RemoteProtocolError("the request is HTTP/1.0 and has transfer-encoding")
        except h11.RemoteProtocolError as error:
            self.refused = (error.error_status_hint, str(error))
            raise
        return event

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """As h11's, through which it sends everything. An answer before the end of the request's body says that the
        connection ends with it: what follows would have to be read to its end before the next request can be found.
        """
        if isinstance(event, h11.Response) and self.their_state is h11.SEND_BODY:
            headers = [(name, value) for name, value in event.headers.raw_items() if name.lower() != b"connection"]
            event = h11.Response(
                status_code=event.status_code, headers=[*headers, (b"connection", b"close")], reason=event.reason
            )
        return super().send_with_data_passthrough(event)


def _size(request: h11.Request) -> int:
    """Bytes of the head; h11 itself looks at its size only while it is incomplete."""
    fields = sum(len(name) + len(value) + len(b": \r\n") for name, value in request.headers)
    return len(request.method) + len(request.target) + len(b"  HTTP/1.1\r\n\r\n") + fields
