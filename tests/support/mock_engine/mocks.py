"""Mock engines in a process of their own, and plain HTTP to them."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.child import environment

READY_S = 20.0


@dataclasses.dataclass
class Answer:
    """One answer; ``events`` are the data lines of a stream."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        lines = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    @property
    def text(self) -> str:
        """The text of a completion or chat, streamed or not."""
        if not self.headers.get("content-type", "").startswith("text/event-stream"):
            choice = self.json()["choices"][0]
            return str(choice["text"] if "text" in choice else choice["message"]["content"])
        choices = [event["choices"][0] for event in self.events if event != "[DONE]" and event["choices"]]
        return "".join(one["text"] if "text" in one else one["delta"].get("content") or "" for one in choices)


class Engine:
    """One engine of a process."""

    def __init__(self, shown: dict[str, Any]) -> None:
        self.shown = shown
        self.port: int = shown["port"]
        self.url: str = shown["http_url"]

    def request(self, method: str, path: str, body: Any = None, *, timeout_s: float = 10.0, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        content = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(connection):
            connection.request(method, path, content, named)
            answer = connection.getresponse()
            shown = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, shown, answer.read())

    def post(self, path: str, body: Any, **more: Any) -> Answer:
        return self.request("POST", path, body, **more)

    def complete(self, prompt: Any = "Say something.", tokens: int = 8, **fields: Any) -> Answer:
        return self.post("/v1/completions", {"prompt": prompt, "max_tokens": tokens, **fields})

    def fault(self, fault: str, **fields: Any) -> None:
        assert self.post("/mock/faults", {"fault": fault, **fields}).status == 200

    def statistics(self) -> dict[str, Any]:
        return dict(self.request("GET", "/mock/statistics").json())

    def wait(self, condition: Callable[[dict[str, Any]], bool], *, timeout_s: float = 10.0) -> dict[str, Any]:
        """The statistics that meet ``condition``, which must come true."""
        deadline_s = time.monotonic() + timeout_s
        while not condition(now := self.statistics()):
            assert time.monotonic() < deadline_s, now
            time.sleep(0.01)
        return now

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def raw(self, path: str, body: Any, *, headers: str = "") -> bytes:
        """The bytes of a request."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: mock\r\n{headers}content-length: {len(content)}\r\n\r\n"
        return head.encode() + content


class Mocks:
    """A process of mock engines."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "kvxfer.cli", "mock-engine", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, said = self.process.communicate(timeout=READY_S)
            raise AssertionError(said.decode())
        self.ready: dict[str, Any] = json.loads(line)
        self.engines = [Engine(shown) for shown in self.ready["engines"]]

    def stop(self, signal_number: int = signal.SIGINT) -> tuple[int, str]:
        """Exit code and what it wrote to stderr."""
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        _, said = self.process.communicate(timeout=10)
        return self.process.returncode, said.decode()


@contextlib.contextmanager
def mocks(*flags: str) -> Iterator[Mocks]:
    """A process that ends with the block, without a traceback in its log."""
    started = Mocks(*flags)
    try:
        yield started
    finally:
        _, said = started.stop()
        assert "Traceback" not in said, said


def free_ports(count: int) -> list[int]:
    """Ports in a row that nothing listens on now."""
    for first in range(21000, 30000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                one = stack.enter_context(socket.socket())
                one.bind(("127.0.0.1", port))
            return list(range(first, first + count))
    raise AssertionError("no ports are free")


def read_all(connection: socket.socket, *, timeout_s: float = 10.0) -> bytes:
    """Everything until the other side closes, or says nothing for ``timeout_s``."""
    connection.settimeout(timeout_s)
    parts = []
    with contextlib.suppress(ConnectionResetError, TimeoutError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)
