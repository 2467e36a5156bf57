"""A server whose answers a test writes byte by byte, and the bodies that name them: what a load driver is tried on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvxfer.load.drive.start import DriveResult, drive
from kvxfer.load.options import DriveOptions, TargetOptions
from kvxfer.load.record import MeasuredRequest
from kvxfer.workload.request import DispatchMode, Workload, WorkloadRequest

OPTIONS = {field.name for field in dataclasses.fields(DriveOptions)} - {"warmup"}
CLOSE, RESET = "close", "reset"
Step = bytes | str | threading.Event
"""Bytes are sent, CLOSE and RESET end the connection, an event is waited for."""


@dataclasses.dataclass
class AskedOf:
    """One request as it came. ``place`` counts the requests of its connection, ``connection`` the connections."""

    route: str
    headers: dict[str, str]
    body: dict[str, Any]
    connection: int
    place: int

    @property
    def number(self) -> int:
        return int(self.body["number"])


Script = Callable[[AskedOf], Iterator[Step]]


def sse(*events: Any, done: bool = True, comment: bytes = b"") -> bytes:
    lines = [b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) for event in events]
    lines += [comment] if comment else []
    lines += [b"data: [DONE]"] if done else []
    return b"".join(line + b"\n\n" for line in lines)


def token(text: str = "x", **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None}], **more}


def usage(completion: int, prompt: int = 7, **more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **more}}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data) if data else b""


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def stream(*events: Any, **more: Any) -> bytes:
    """A whole streamed answer."""
    return STREAM_HEAD + chunk(sse(*events, **more)) + LAST_CHUNK


def plain(status: int, value: Any, headers: str = "") -> bytes:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{headers}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def good(_asked: AskedOf) -> Iterator[Step]:
    yield stream(token("a"), token("b"), usage(2))


class ScriptedServer:
    """Listens on loopback; a thread for each connection. ``asked`` is what came, in order."""

    def __init__(self, script: Script, *, context: ssl.SSLContext | None = None, read_late: bool = False) -> None:
        self._script, self._context, self._read_late = script, context, read_late
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._connections = 0
        self.asked: list[AskedOf] = []
        self._came = threading.Condition()
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http{'s' if context else ''}://127.0.0.1:{self.port}"
        self._threads.append(threading.Thread(target=self._accept))
        self._threads[0].start()

    def wait(self, count: int) -> None:
        """Until so many requests have come."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.asked) >= count, 20)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            self._open.add(one)
            thread = threading.Thread(target=self._serve, args=(one, self._connections))
            self._connections += 1
            self._threads.append(thread)
            thread.start()

    def _serve(self, one: socket.socket, connection: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._context is not None:
                one.settimeout(10)
                self._open.discard(one)
                one = self._context.wrap_socket(one, server_side=True)
                self._open.add(one)
            self._answer(one, connection)
        self._open.discard(one)
        one.close()

    def _answer(self, one: socket.socket, connection: int) -> None:
        with one.makefile("rb", buffering=1 if self._read_late else -1) as reader:
            place = 0
            while line := reader.readline():
                headers = {}
                while (header := reader.readline().strip()) != b"":
                    name, _, value = header.decode().partition(":")
                    headers[name.lower()] = value.strip()
                body = reader.read(int(headers.get("content-length", "0")))
                asked = AskedOf(line.split()[1].decode(), headers, json.loads(body or b"{}"), connection, place)
                with self._came:
                    self.asked.append(asked)
                    self._came.notify_all()
                place += 1
                for step in self._script(asked):
                    if isinstance(step, bytes):
                        one.sendall(step)
                    elif isinstance(step, threading.Event):
                        step.wait(20)
                    else:
                        if step == RESET:
                            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        return


@contextlib.contextmanager
def scripted(script: Script = good, **more: Any) -> Iterator[ScriptedServer]:
    server = ScriptedServer(script, **more)
    try:
        yield server
    finally:
        server.close()


@dataclasses.dataclass(frozen=True)
class NumberBody:
    """A body that says the request's number; ``pad`` bytes more, made in ``make_s``; those of ``broken`` cannot be
    made."""

    pad: int = 0
    make_s: float = 0.0
    broken: tuple[int, ...] = ()

    def __call__(self, request: WorkloadRequest) -> bytes:
        if request.number in self.broken:
            raise RuntimeError("no such body")
        time.sleep(self.make_s)
        asked = {"model": "mock", "prompt": "x", "max_tokens": request.output_tokens, "stream": True}
        body = asked | {
            "number": request.number,
            "session": request.session,
            "turn": request.turn,
            "pad": "x" * self.pad,
        }
        return json.dumps(body).encode()


def workload_of(due_s: Sequence[float], **more: Any) -> Workload:
    """Single requests due then."""
    return Workload("test", [WorkloadRequest(number, 5, 2, due) for number, due in enumerate(due_s)], **more)


def sessions_of(count: int, turns: int, *, think_s: float, mode: DispatchMode) -> Workload:
    """Sessions that begin together, and whose turns are due each ``think_s``."""
    requests = [
        WorkloadRequest(turn * count + session, 5, 2, turn * think_s, think_s, session, turn)
        for turn in range(turns)
        for session in range(count)
    ]
    return Workload("test", requests, mode=mode)


def driven(
    url: str, workload: Workload, body: NumberBody | None = None, *, target: Any = None, **more: Any
) -> tuple[DriveResult, list[MeasuredRequest]]:
    """The result, and the records by number: each planned request has exactly one."""
    records: list[MeasuredRequest] = []
    named = {field: more.pop(field) for field in list(more) if field in OPTIONS}
    options = DriveOptions(**{"processes": 1, "drain_s": 10.0, "timeout_s": 10.0, **named})
    asked = TargetOptions(**{"url": url, **(target or {})})
    on_record = more.pop("on_record", records.append)
    result = drive(workload, body or NumberBody(), asked, options, run="test", on_record=on_record, **more)
    records.sort(key=lambda record: record.number)
    if on_record == records.append:
        assert [record.number for record in records] == [request.number for request in workload.requests]
    return result, records
