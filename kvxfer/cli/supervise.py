"""Child processes of one command: started, watched, and stopped in order; none outlives this process.

Decides when a child counts as ready (it has written its ready line and, if it has a ``ready_path``, its HTTP server
answers there with 200) or lost (it ended unasked). The ready line is a JSON object on stdout with ``"event": "ready"``
and the child's addresses. This module must never know what the children do for each other: the caller decides which
ones there are, and with which flags.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from kvxfer.cli import asking
from kvxfer.cli.progress import wait_while_it_gets_on
from kvxfer.errors import ConfigError, DeadlineExceededError, KvxferError, TransportError

STOP_GRACE_S = 15.0
"""A child that has not ended this long after SIGTERM is killed."""
START_GRACE_S = 1.0
"""The same for a child that is not ready yet. It may be loading a model, which it cannot interrupt, and it serves no
request that it would have to finish."""
PROBE_EVERY_S = 0.1
PROBE_TIMEOUT_S = 5.0
TAIL_LINES = 40
LINE_BYTES_MAX = 1 << 20


@dataclasses.dataclass(frozen=True)
class ChildSpec:
    """One child: its name on screen, the words after ``kvxfer``, and additions to its environment.

    ``ready_path``: it is not ready before its HTTP server answers 200 there; empty: once its ready line came.
    """

    name: str
    words: Sequence[str]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ready_path: str = ""


@dataclasses.dataclass
class Child:
    """A started child. ``ready`` is its ready line once that came; ``tail`` the end of what it wrote to stderr."""

    spec: ChildSpec
    process: asyncio.subprocess.Process
    started_s: float
    ready: dict[str, Any] = dataclasses.field(default_factory=dict)
    ready_after_s: float = 0.0
    tail: collections.deque[str] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=TAIL_LINES))
    is_ready: bool = False
    written_bytes: int = 0
    """How many bytes it wrote to stdout and stderr."""
    is_stopping: bool = False
    why_not_ready: str = ""

    @property
    def address(self) -> str:
        return str(self.ready.get("address") or "")

    @property
    def http_url(self) -> str:
        return str(self.ready.get("http_url") or "")

    def ending(self) -> str:
        """How the process ended, in words; it must have ended."""
        code = self.process.returncode
        assert code is not None
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with code {code}"


class Supervisor:
    """Owns the children. Use as an async context manager: leaving it stops every child, newest first.

    ``on_ready(child)`` and ``on_lost(child)`` are called on the loop; ``on_line(name, line)`` with each stderr line.
    """

    def __init__(
        self,
        *,
        command: Sequence[str] = (sys.executable, "-P", "-m", "kvxfer.cli"),
        on_ready: Callable[[Child], None] = lambda child: None,
        on_lost: Callable[[Child], None] = lambda child: None,
        on_line: Callable[[str, str], None] = lambda name, line: None,
    ) -> None:
        self._command = command
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_line = on_line
        self._children: list[Child] = []
        self._tasks: dict[int, list[asyncio.Task[None]]] = {}

    def __repr__(self) -> str:
        return f"<Supervisor children={[child.spec.name for child in self._children]}>"

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for child in reversed(list(self._children)):
            await self.stop(child)

    @property
    def children(self) -> tuple[Child, ...]:
        return tuple(self._children)

    async def start(self, spec: ChildSpec, *, timeout_s: float) -> Child:
        """Start a child and wait until it is ready.

        Raises ConfigError where the child ended with code 2, KvxferError where it ended otherwise, both with the
        child's own last line; DeadlineExceededError, when the child has been stopped, once it did nothing for
        ``timeout_s`` (nothing written, no processor time), or was busy and not ready for ten times as long.
        """
        process = await asyncio.create_subprocess_exec(
            *(*self._command, *spec.words, f"--exit-with-parent={os.getpid()}"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **spec.environment},
            limit=LINE_BYTES_MAX,
            start_new_session=True,
        )
        child = Child(spec, process, time.monotonic())
        self._children.append(child)
        is_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks[id(child)] = [
            asyncio.create_task(self._read_stdout(child, is_ready)),
            asyncio.create_task(self._read_stderr(child)),
            asyncio.create_task(self._watch(child, is_ready)),
        ]
        try:
            await wait_while_it_gets_on(
                self._wait_ready(child, is_ready),
                session=process.pid,
                written_bytes=lambda: child.written_bytes,
                timeout_s=timeout_s,
            )
        except TimeoutError as error:
            await self.stop(child)
            why = f": {child.why_not_ready}" if child.why_not_ready else ""
            last = f"; its last line: {child.tail[-1]}" if child.tail else ""
            raise DeadlineExceededError(f"{spec.name} did not become ready: {error}{why}{last}") from None
        except BaseException:
            await self.stop(child)
            raise
        child.is_ready = True
        child.ready_after_s = time.monotonic() - child.started_s
        self._on_ready(child)
        return child

    async def stop(self, child: Child) -> None:
        """End a child: SIGTERM, then SIGKILL after its grace. Repeats are harmless."""
        if child not in self._children:
            return
        child.is_stopping = True
        if child.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.process.terminate()
            try:
                async with asyncio.timeout(STOP_GRACE_S if child.ready else START_GRACE_S):
                    await child.process.wait()
            except TimeoutError:
                if child.ready:
                    self._on_line(child.spec.name, f"did not stop within {STOP_GRACE_S:g} s and was killed")
                with contextlib.suppress(ProcessLookupError):
                    child.process.kill()
                await child.process.wait()
        await asyncio.gather(*self._tasks.pop(id(child), []), return_exceptions=True)
        if child in self._children:
            self._children.remove(child)

    async def _wait_ready(self, child: Child, is_ready: asyncio.Future[None]) -> None:
        """Return once the ready line has come, and ``ready_path``, if there is one, is answered with 200."""
        await is_ready
        if child.spec.ready_path:
            await self._probe(child)

    async def _probe(self, child: Child) -> None:
        """Return once ``ready_path`` is answered with 200; raise KvxferError where the child ends before that."""
        while True:
            try:
                status, content = await asking.get(child.http_url, child.spec.ready_path, timeout_s=PROBE_TIMEOUT_S)
                if status == 200:
                    return
                child.why_not_ready = _reason(content) or f"it answers {status}"
            except TransportError as error:
                child.why_not_ready = f"it cannot be asked ({error})"
            if child.process.returncode is not None:
                await self._tasks[id(child)][1]
                raise _failed_start(child)
            await asyncio.sleep(PROBE_EVERY_S)

    async def _read_stdout(self, child: Child, is_ready: asyncio.Future[None]) -> None:
        assert child.process.stdout is not None
        async for raw in _lines(child.process.stdout):
            child.written_bytes += len(raw)
            try:
                line = json.loads(raw)
            except ValueError:
                line = None
            if isinstance(line, dict) and line.get("event") == "ready" and not is_ready.done():
                child.ready = line
                is_ready.set_result(None)

    async def _read_stderr(self, child: Child) -> None:
        assert child.process.stderr is not None
        async for raw in _lines(child.process.stderr):
            child.written_bytes += len(raw)
            line = raw.decode(errors="replace").rstrip()
            child.tail.append(line)
            self._on_line(child.spec.name, line)

    async def _watch(self, child: Child, is_ready: asyncio.Future[None]) -> None:
        await child.process.wait()
        if not is_ready.done():
            await self._tasks[id(child)][1]
            is_ready.set_exception(_failed_start(child))
        elif child.is_ready and not child.is_stopping:
            self._on_lost(child)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Line by line to the end. What is longer than LINE_BYTES_MAX is dropped: a pipe that is not read stops the
    child that writes to it.
    """
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue
        if not line:
            return
        yield line


def _reason(content: bytes) -> str:
    """The reason in the body of an answer other than 200; empty if another program answered."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return ""
    return str(body.get("message") or body.get("reason") or "")[:200] if isinstance(body, dict) else ""


def _failed_start(child: Child) -> KvxferError:
    words = next((line for line in reversed(child.tail) if line.startswith("kvxfer")), None)
    why = words.removeprefix("kvxfer: ") if words else f"it {child.ending()}"
    message = f"{child.spec.name} could not start: {why}"
    return ConfigError(message) if child.process.returncode == 2 else KvxferError(message)
