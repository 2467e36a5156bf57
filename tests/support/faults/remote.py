"""A party in another process, spoken to as if it were here; and what can be done to that process."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.support import child

ANSWER_S = 60.0


class Remote:
    """Every method of Party, by its name; raises AssertionError with the other side's error."""

    def __init__(self, name: str, lanes: Sequence[str], *, command: Sequence[str] = (), **options: Any) -> None:
        """``command`` goes before the process's own (another network namespace)."""
        self.process = subprocess.Popen(
            [*command, *child.command("faults.remote_process")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child.environment(),
        )
        self.name, self.pid = name, self.process.pid
        try:
            self.call("open", list(lanes), **options)
        except BaseException:
            self.kill()
            raise

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        self.send(name, *arguments, **options)
        return self.answer()

    def send(self, name: str, *arguments: Any, **options: Any) -> None:
        """Ask, and fetch the :meth:`answer` later."""
        self.send_to(self.name, name, arguments, options)

    def send_to(self, party: str, name: str, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([party, name, arguments, options]).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        answers = select.poll()
        answers.register(self.process.stdout, select.POLLIN)
        assert answers.poll(ANSWER_S * 1000), f"no answer in {ANSWER_S} s"
        line = self.process.stdout.readline()
        assert line, f"the worker ended with {self.process.wait(10)}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments, **options: self.call(name, *arguments, **options)

    def memory_of(self, index: int, nbytes: int) -> Any:
        """The region's bytes as they are now, whatever its process does; shape [nbytes]."""
        with open(f"/proc/{self.pid}/fd/{self.region_file(index)}", "rb") as file:
            mapping = mmap.mmap(file.fileno(), nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        return np.frombuffer(mapping, np.uint8)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and wait until the kernel has taken everything back."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._reap()

    def close(self) -> None:
        """The polite way; the process must end by itself."""
        if self.process.poll() is not None:
            self._reap()
            return
        self.go_on()
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            code = self.process.wait(20)
        finally:
            self.kill()
        assert code == 0, f"the worker ended with {code}"

    def _reap(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self.process.wait(20)


class Beside:
    """Another party in that process: every method of Party, by its name. It ends with the process."""

    def __init__(self, remote: Remote, name: str, lanes: Sequence[str], **options: Any) -> None:
        self.remote, self.name = remote, name
        self.call("open", list(lanes), **options)

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        self.remote.send_to(self.name, name, arguments, options)
        return self.remote.answer()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments, **options: self.call(name, *arguments, **options)

    def close(self) -> None:
        pass
