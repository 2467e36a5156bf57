"""An OpenTelemetry collector that only remembers: OTLP over HTTP in JSON, in a thread of this process."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any


class Collector:
    """``statuses`` are what it answers to the next posts, in order; 200 after them."""

    def __init__(self) -> None:
        self.port = 0
        self.statuses: list[int] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        """Of the posts that it took."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def spans(self) -> list[dict[str, Any]]:
        scopes = [scope for body in self.bodies for one in body["resourceSpans"] for scope in one["scopeSpans"]]
        return [span for scope in scopes for span in scope["spans"]]


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                content = gzip.decompress(content)
            status = collector.statuses.pop(0) if collector.statuses else 200
            collector.headers.append({name.lower(): value for name, value in self.headers.items()})
            collector.paths.append(self.path)
            if status == 200:
                collector.bodies.append(json.loads(content))
            self.send_response(status)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        collector.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    """A span's attributes as plain values."""
    return {one["key"]: _plain(one["value"]) for one in span["attributes"]}


def _plain(value: dict[str, Any]) -> Any:
    ((kind, said),) = value.items()
    return int(said) if kind == "intValue" else said
