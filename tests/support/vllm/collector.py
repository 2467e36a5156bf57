"""An OTLP collector of HTTP and protobuf that keeps the spans it is sent. Reads only the few fields that
tests ask for."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import threading
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Collected:
    """One span, as its engine exported it. Ids in hex."""

    name: str
    trace_id: str
    parent_id: str
    duration_ns: int


class Collector(http.server.ThreadingHTTPServer):
    """``spans`` grows with every export."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Collected] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def of(self, trace_id: str) -> list[Collected]:
        return [span for span in tuple(self.spans) if span.trace_id == trace_id]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.spans += _spans(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Tests read what was collected."""


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


def _spans(request: bytes) -> Iterator[Collected]:
    """Of an ExportTraceServiceRequest: resource_spans 1, scope_spans 2, spans 2."""
    for resource in _fields(request).get(1, ()):
        for scope in _fields(resource).get(2, ()):
            for span in _fields(scope).get(2, ()):
                values = _fields(span)
                start, end = (int.from_bytes(values[number][0], "little") for number in (7, 8))
                parent = values.get(4, [b""])[0].hex()
                yield Collected(values[5][0].decode(), values[1][0].hex(), parent, end - start)


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """A protobuf message's fields by number; numbers that are no fixed64 are left out."""
    fields: dict[int, list[bytes]] = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            _, at = _varint(message, at)
            continue
        if kind == 2:
            length, at = _varint(message, at)
        else:
            length = {1: 8, 5: 4}[kind]
        fields.setdefault(key >> 3, []).append(message[at : at + length])
        at += length
    return fields


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
