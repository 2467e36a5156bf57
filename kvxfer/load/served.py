"""A service that is started for a test, waited for, and ended again with all its processes.

Decides when the service counts as started and how it is ended; nothing about what it serves, or what is asked of it.
The service is a process with a session of its own, so that a Ctrl-C at the terminal reaches this process alone. Ending
it: SIGINT, after a grace SIGTERM, after another one SIGKILL for each process that descends from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from kvxfer.errors import ConfigError, DeadlineExceededError, KvxferError
from kvxfer.load import probing
from kvxfer.load.descendants import Seen, descendants, in_session, lower_groups
from kvxfer.load.drive.priority import can_be_realtime

START_S = 300.0
"""How long a start may take where the caller does not say it."""
STOP_S = 30.0
"""How long the service may take to end by itself."""
POLL_S = 0.1
TAIL_BYTES = 64 << 10
READY_BYTES_MAX = 4 << 20

_running: dict[int, subprocess.Popen[bytes]] = {}
"""Services that were started and not ended, by process."""


@dataclasses.dataclass
class StartedService:
    """A started service."""

    url: str
    model: str
    """Empty where the service did not say it."""
    pid: int
    ready: dict[str, Any]
    """Its ready line; empty for a foreign one."""
    _process: subprocess.Popen[bytes]
    _log: pathlib.Path

    def losses(self) -> list[str]:
        """What broke since the start, in the service's own words; empty: all of it runs."""
        lines = tail(self._log)
        found = [line.removeprefix("kvxfer: ") for line in lines if line.startswith("kvxfer: lost ")]
        if self._process.poll() is not None:
            found.append(ending("the service", self._process.returncode, lines))
        return found


def serve_command(*flags: str) -> list[str]:
    """``kvxfer serve`` on a free port, for :func:`served`; it ends when this process does."""
    command = [sys.executable, "-P", "-m", "kvxfer.cli", "serve", "--ready-json", "--port=0", "--quiet"]
    return [*command, f"--exit-with-parent={os.getpid()}", *flags]


@contextlib.contextmanager
def served(
    command: Sequence[str],
    *,
    url: str = "",
    nice: int = 0,
    start_s: float = START_S,
    stop_s: float = STOP_S,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[StartedService]:
    """Run ``command`` until the block ends; nothing of it is left then, whatever ended the block.

    ``url``: it is ready once that answers, for a service of another maker; empty: once its ready line has come, as
    ``kvxfer serve --ready-json`` prints it. ``nice``: so much lower is its priority than that of this process, which
    must send in time where both share the processors. ``is_stopped``: the start is given up once it says so, with
    KeyboardInterrupt. To be called on a thread that lasts as long as the service: the kernel ends ``kvxfer serve`` with
    the thread that started it.

    Raises ConfigError where the command does not exist or says that it was told something wrong, KvxferError where it
    ends before it is ready, DeadlineExceededError where it is not ready after ``start_s`` seconds; each with the last
    words of the service.
    """
    with tempfile.TemporaryDirectory(prefix="kvxfer-served-") as directory:
        log = pathlib.Path(directory, "stderr.log")
        with log.open("wb") as errors:
            try:
                if shutil.which(command[0]) is None:
                    raise ConfigError(f"cannot start {command[0]}: there is no such program")
                process = subprocess.Popen(
                    [*_niced(nice), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=errors if url else subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(f"cannot start {command[0]}: {error.strerror}") from None
        below: set[Seen] = set()
        _running[process.pid] = process
        try:
            deadline_s = time.monotonic() + start_s
            wait = _Wait(process, log, deadline_s, start_s, is_stopped)
            ready = {} if url else wait.ready_line()
            if url:
                wait.answers(url)
            below |= descendants(process.pid) | in_session(process.pid)
            if nice:
                lower_groups(below, nice)
            where, model = str(ready.get("url", url)), str(ready.get("model", ""))
            yield StartedService(where, model, process.pid, ready, process, log)
        finally:
            _end(process, below, stop_s)
            _running.pop(process.pid, None)


def _niced(nice: int) -> list[str]:
    """The programs that lower the priority, where there are such; the last becomes the command. Where sending processes
    cannot be put before all others, the service is put behind all others: a lower priority alone lets it finish its
    time slice first, by which they were up to 19 ms late."""
    if not nice:
        return []
    program, behind = shutil.which("nice"), None if can_be_realtime() else shutil.which("chrt")
    return [*([behind, "--idle", "0"] if behind else []), *([program, "-n", str(nice)] if program else [])]


@dataclasses.dataclass
class _Wait:
    """Waiting for one start. The deadline is of the monotonic clock."""

    process: subprocess.Popen[bytes]
    log: pathlib.Path
    deadline_s: float
    start_s: float
    is_stopped: Callable[[], bool]

    def check(self, why: str = "") -> None:
        """Raise where waiting is of no more use."""
        if self.is_stopped():
            raise KeyboardInterrupt
        code = self.process.poll()
        if code is not None:
            said = ending("the service", code, tail(self.log))
            raise ConfigError(said) if code == 2 else KvxferError(said)
        if time.monotonic() > self.deadline_s:
            last = "; ".join(last_words(tail(self.log)))
            words = f"the service was not ready within {self.start_s:g} s"
            raise DeadlineExceededError(": ".join(part for part in (words, why, last) if part))

    def ready_line(self) -> dict[str, Any]:
        """The first line of its output that is a ready line."""
        output = self.process.stdout
        assert output is not None
        os.set_blocking(output.fileno(), False)
        content = b""
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while True:
                if selector.select(POLL_S):
                    piece = output.read(1 << 16) or b""
                    content += piece
                    if not piece:  # it closed its output
                        self._wait_ended()
                for line in content.split(b"\n")[:-1]:
                    with contextlib.suppress(ValueError, RecursionError):
                        value = json.loads(line)
                        if isinstance(value, dict) and value.get("event") == "ready" and value.get("url"):
                            return value
                content = content.rpartition(b"\n")[2]
                if len(content) > READY_BYTES_MAX:
                    raise KvxferError("the service prints something that is no ready line")
                self.check()

    def answers(self, url: str) -> None:
        """Return once one of the known readiness routes of ``url`` answers."""
        while True:
            why = probing.why_not_ready(url)
            if not why:
                return
            self.check(why)
            time.sleep(POLL_S)

    def _wait_ended(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self.check("it closed its output")
        time.sleep(POLL_S)


def tail(log: pathlib.Path) -> list[str]:
    """The last lines of a log."""
    try:
        with log.open("rb") as file:
            _seek_tail(file)
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _seek_tail(file: IO[bytes]) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL_BYTES))


def last_words(lines: Sequence[str]) -> list[str]:
    """What a process said of its end: kvxfer's own sentence, else its last three lines."""
    ours = [line.removeprefix("kvxfer: ") for line in lines if line.startswith("kvxfer: ")]
    return [ours[-1]] if ours else [line.strip()[:300] for line in lines if line.strip()][-3:]


def ending(name: str, code: int, lines: Sequence[str]) -> str:
    """How the process ``name`` ended, with its last words."""
    try:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    except ValueError:
        how = f"was ended by signal {-code}"
    words = "; ".join(last_words(lines))
    return f"{name} {how}" + (f": {words}" if words else "")


def _end(process: subprocess.Popen[bytes], below: set[Seen], stop_s: float) -> None:
    """End ``process`` and all that descends from it. Ctrl-C is for the processes of its session, as from a terminal:
    ``kvxfer serve`` ends its children itself. What is left after the graces is killed."""
    try:
        for number, grace_s in ((signal.SIGINT, stop_s), (signal.SIGTERM, min(stop_s, 5.0))):
            session = in_session(process.pid)
            below |= descendants(process.pid) | session
            for seen in session:
                if seen.pid != process.pid:
                    seen.send(number)
            if process.poll() is None:  # once: a second Ctrl-C would end it at once
                process.send_signal(number)
            if _are_gone(process, below, grace_s):
                break
    finally:  # also where a second Ctrl-C came meanwhile
        below |= descendants(process.pid) | in_session(process.pid)
        if process.poll() is None:
            process.kill()
        for seen in below:
            seen.send(signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        _are_gone(process, below, 5.0)


def kill_all() -> None:
    """Kill every service that runs, with all its processes, and wait for none: for a process that ends at once."""
    for process in list(_running.values()):
        for seen in descendants(process.pid) | in_session(process.pid):
            seen.send(signal.SIGKILL)


def _are_gone(process: subprocess.Popen[bytes], below: set[Seen], wait_s: float) -> bool:
    deadline_s = time.monotonic() + wait_s
    while process.poll() is None or any(seen.is_running() for seen in below):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True
