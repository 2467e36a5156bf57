"""Two processes with memory on a CUDA device between them. Where there is no device these tests are skipped."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.transport import ucx
from tests.support import child
from tests.support.cuda.end import POISON

DEVICE = "cuda:0"
STOP_S = 60.0
"""How long an end may take to end: a second on a quiet machine."""
LIBRARY = ucx.find_library()  # before the fixtures take KVXFER_* out of the environment
NO_DEVICE = "" if torch.cuda.is_available() else "torch finds no CUDA device here"
NO_UCX = ucx.missing(LIBRARY) or ("" if LIBRARY.has_cuda_module else f"{LIBRARY.path} was built without CUDA")
needs_device = pytest.mark.skipif(bool(NO_DEVICE), reason=NO_DEVICE)
needs_ucx = pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX)
each_lane = pytest.mark.parametrize("lane", ["unix", "stream", pytest.param("ucx", marks=needs_ucx)])


class EndProcess:
    """An :class:`End` in a process, asked and answered."""

    def __init__(self, name: str, lanes: str, environment: dict[str, str]) -> None:
        self.name = name
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        self.process = subprocess.Popen(
            child.command("cuda.end", name, lanes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=child.environment(**environment),
        )

    def start(self, request: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": request, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def finish(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"the process ended with {self.process.wait(10)}"}
        if "error" in answer:
            self.log.seek(0)
            pytest.fail(f"{self.name}: {answer['error']}\n{self.log.read().decode(errors='replace')[-3000:]}")
        return answer["ok"]

    def ask(self, request: str, **arguments: Any) -> Any:
        self.start(request, **arguments)
        return self.finish()

    def bytes(self, name: str) -> Any:
        """All of that memory, with what lies on either side of it."""
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "bytes")
            self.ask("dump", name=name, path=path)
            return np.fromfile(path, np.uint8)

    def stop(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"{self.name} does not end")
        finally:
            self.log.close()


Ends = Callable[..., tuple[EndProcess, EndProcess]]


def poison(nbytes: int) -> Any:
    return np.full(nbytes, POISON, np.uint8)


def assert_same(got: Any, expected: Any) -> None:
    """Every byte; says where the first wrong ones are, and what is there."""
    wrong = np.flatnonzero(got != expected)
    assert wrong.size == 0, f"{wrong.size} of {got.size} bytes, from {wrong[:3]} on: {got[wrong[:3]]}"
