"""An engine with a tier, and a ``kvxfer tier`` process, as objects of a test. Knows their command lines only.

The caches are small: the device's has 24 blocks, the primary tier 12, and each prompt takes 9 whole ones. So of four
prompts the first is in neither of them when the last has been answered.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.support.vllm.engines import CACHE, PYTHON, ROOT

DRIVER = ROOT / "tests" / "support" / "vllm" / "tier_engine.py"
TOKENS, BLOCK_TOKENS, WHOLE = 300, 32, 9
ALL = WHOLE * BLOCK_TOKENS
"""Tokens of a prompt that can come back."""
ROW = BLOCK_TOKENS * 4 * 2 * 64 * 2 * 4
"""Bytes of a block: tokens, layers, heads, dims, K and V, float32."""
FILE = ROW + 4096
LLM = {"max_model_len": 640, "block_size": BLOCK_TOKENS, "num_gpu_blocks_override": 24, "max_num_seqs": 4}


def prompt(seed: int, tokens: int = TOKENS, vocab: int = 1000) -> list[int]:
    return [int(token) for token in np.random.Generator(np.random.PCG64(seed)).integers(5, vocab, tokens)]


class Driven:
    """One engine with one tier, or with no offloading where ``tier`` is empty. ``llm``: options of vLLM instead of
    those above. ``inside``: a command that runs it."""

    def __init__(
        self,
        model: pathlib.Path,
        tier: dict[str, Any],
        log: pathlib.Path,
        *,
        llm: dict[str, Any] | None = None,
        cpu_bytes: int = 12 * ROW,
        inside: Sequence[str] = (),
    ) -> None:
        options = {
            "llm": {"model": str(model), **(LLM if llm is None else llm)},
            "cpu_bytes": cpu_bytes,
            "tiers": [{"type": "kvxfer", **tier}] if tier else [],
        }
        self._has_tier = bool(tier)
        environment = {**os.environ, "VLLM_CACHE_ROOT": str(CACHE), "PYTHONPATH": str(ROOT)}
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*inside, str(PYTHON), str(DRIVER), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env=environment,
            )

    def wait_ready(self) -> Driven:
        assert self._line(), self.log.read_text()[-4000:]
        assert self.ask("wait_known") == {"why": [None] if self._has_tier else []}
        return self

    def refusal(self) -> str:
        """What it logged, after it ended instead of becoming ready."""
        assert not self._line(), "it started"
        self.process.wait(60)
        return self.log.read_text()

    def ask(self, op: str, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **more}) + "\n")
        self.process.stdin.flush()
        line = self._line()
        assert line, self.log.read_text()[-4000:]
        return dict(json.loads(line))

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def generate(self, seed: int) -> tuple[list[int], int]:
        """The answer, and how many tokens of the prompt were not computed."""
        answer = self.ask("generate", ids=prompt(seed), n=6)
        return answer["tokens"], answer["cached"]

    def tokens(self, seeds: Sequence[int]) -> list[list[int]]:
        return [self.generate(seed)[0] for seed in seeds]

    def errors(self) -> dict[str, int]:
        return dict(self.ask("counts")["tiers"][0]["errors"])

    def metrics(self) -> dict[str, float]:
        return dict(self.ask("counts")["metrics"])

    def wait_attached(self) -> None:
        assert self.ask("wait_attached", timeout_s=30.0) == {"is_attached": True}

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait(20)
            self.process.stdout.close()


class TierProcess:
    """One ``kvxfer tier`` process, which can be killed and started again on the same port."""

    def __init__(self, folder: pathlib.Path, *flags: str, capacity: int = 64 * ROW, token: str = "token") -> None:
        self.token = str(folder / token)
        self._flags = [f"--capacity-bytes={capacity}", f"--token-file={self.token}", "--agent-id=keeper", *flags]
        self.url = ""
        self.start()

    @property
    def tier(self) -> dict[str, Any]:
        """Options of a tier that uses it."""
        return {"store": "pool", "service": "keeper", "service_url": self.url, "token_file": self.token}

    def start(self) -> None:
        flags = [*self._flags, f"--http-port={self.url.rsplit(':', 1)[1]}"] if self.url else self._flags
        command = [sys.executable, "-m", "kvxfer.cli", "tier", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = json.loads(self.process.stdout.readline())["http_url"]

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line.startswith("kvxfer_tier_")]
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(20)
        if self.process.stdout is not None:
            self.process.stdout.close()


class Within:
    """What is in it lasts at most so long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._began_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        took_s = time.monotonic() - self._began_s
        assert took_s < self._seconds, f"it took {took_s:.1f} s"


def files(path: pathlib.Path) -> list[pathlib.Path]:
    """Files of blocks, the oldest first."""
    return sorted(path.rglob("*.kvb"), key=lambda file: file.stat().st_mtime_ns)
