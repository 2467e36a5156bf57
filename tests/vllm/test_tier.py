"""A tier of kvxfer's in real vLLM: an evicted prefix comes back and is not computed again, and what goes wrong is
computed, by name. The tokens are always those of the same engine's first, computed answer.

The caches are small: the device's has 24 blocks, the primary tier 12, and each prompt takes 9 whole ones.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.vllm.engines import CACHE, PYTHON, ROOT

DRIVER = ROOT / "tests" / "support" / "vllm" / "tier_engine.py"
TOKENS, BLOCK_TOKENS, WHOLE = 300, 32, 9
ROW = BLOCK_TOKENS * 4 * 2 * 64 * 2 * 4
"""Bytes of a block: tokens, layers, heads, dims, K and V, float32."""
FILE = ROW + 4096


def prompt(seed: int) -> list[int]:
    return [int(token) for token in np.random.Generator(np.random.PCG64(seed)).integers(5, 1000, TOKENS)]


class Driven:
    """One engine with one tier."""

    def __init__(self, model: pathlib.Path, tier: dict[str, Any], log: pathlib.Path) -> None:
        llm = {
            "model": str(model),
            "max_model_len": 640,
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": 24,
            "max_num_seqs": 4,
        }
        options = {"llm": llm, "cpu_bytes": 12 * ROW, "tiers": [{"type": "kvxfer", **tier}]}
        environment = {**os.environ, "VLLM_CACHE_ROOT": str(CACHE), "PYTHONPATH": str(ROOT)}
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [str(PYTHON), str(DRIVER), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env=environment,
            )
        assert self.process.stdout is not None
        self.said = self.process.stdout
        assert self.said.readline(), log.read_text()[-4000:]
        assert self.ask("wait_known") == {"why": [None]}

    def ask(self, op: str, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **more}) + "\n")
        self.process.stdin.flush()
        return dict(json.loads(self.said.readline()))

    def generate(self, seed: int) -> tuple[list[int], int]:
        """The answer, and how many tokens of the prompt were not computed."""
        answer = self.ask("generate", ids=prompt(seed), n=6)
        return answer["tokens"], answer["cached"]

    def tokens(self, seeds: Sequence[int]) -> list[list[int]]:
        return [self.generate(seed)[0] for seed in seeds]

    def errors(self) -> dict[str, int]:
        return dict(self.ask("counts")["tiers"][0]["errors"])

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.said.close()


@pytest.fixture
def engines(tmp_path: pathlib.Path, tiny_model: pathlib.Path) -> Iterator[Any]:
    started: list[Driven] = []

    def start(**tier: Any) -> Driven:
        started.append(Driven(tiny_model, tier, tmp_path / f"engine-{len(started)}.log"))
        return started[-1]

    yield start
    for engine in started:
        engine.end()


def files(path: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path.rglob("*.kvb"), key=lambda file: file.stat().st_mtime_ns)


def test_evicted_prefixes_come_back_from_files_and_wrong_files_are_computed(
    engines: Any, tmp_path: pathlib.Path
) -> None:
    store = {"store": "file", "path": str(tmp_path / "kv"), "capacity_bytes": 64 * FILE}
    engine = engines(**store)
    first = engine.tokens([1, 2, 3, 4])
    assert engine.generate(1) == (first[0], WHOLE * BLOCK_TOKENS)
    metrics = engine.ask("counts")["metrics"]
    assert metrics["vllm:prompt_tokens_cached_by_source{source=disk}"] == WHOLE * BLOCK_TOKENS
    assert metrics["vllm:kvxfer_tier_loaded_blocks{}"] == WHOLE
    for path in files(tmp_path / "kv"):  # of every prompt
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert engine.generate(2) == (first[1], 0)
    assert engine.errors() == {"load block_damaged": WHOLE}
    engine.tokens([3, 4])
    assert engine.generate(2) == (first[1], WHOLE * BLOCK_TOKENS)  # it was stored again
    engine.ask("changed")
    engine.tokens([3, 4])
    assert engine.generate(1)[1] == 0
    assert engine.errors()["find weights_unknown"]


@pytest.mark.nightly
def test_the_next_engine_finds_the_files_and_a_full_store_is_bounded(engines: Any, tmp_path: pathlib.Path) -> None:
    store = {"store": "file", "path": str(tmp_path / "kv"), "capacity_bytes": 20 * FILE}
    engine = engines(**store)
    first = engine.tokens([1, 2, 3, 4])
    assert len(files(tmp_path / "kv")) == 20
    engine.end()
    engine = engines(**store)
    assert engine.generate(4) == (first[3], WHOLE * BLOCK_TOKENS)
    assert engine.generate(1) == (first[0], 0)
    assert sum(path.stat().st_size for path in files(tmp_path / "kv")) <= 20 * FILE


@pytest.mark.nightly
def test_a_store_without_room_is_named_and_computed(engines: Any, tmp_path: pathlib.Path) -> None:
    engine = engines(store="file", path=str(tmp_path / "kv"), capacity_bytes=FILE - 1)
    first = engine.tokens([1, 2, 3, 4])
    assert engine.generate(1) == (first[0], 0)
    assert engine.errors()["save store_full"] >= 3 * WHOLE


@pytest.fixture
def service(tmp_path: pathlib.Path) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    token = str(tmp_path / "token")
    flags = [f"--capacity-bytes={64 * ROW}", f"--token-file={token}", "--agent-id=keeper"]
    process = subprocess.Popen([sys.executable, "-m", "kvxfer.cli", "tier", *flags], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, json.loads(process.stdout.readline())["http_url"], token
    process.kill()
    process.wait(20)
    process.stdout.close()


@pytest.mark.nightly
def test_evicted_prefixes_come_back_from_another_process_and_are_computed_once_it_is_killed(
    engines: Any, service: tuple[subprocess.Popen[str], str, str]
) -> None:
    process, url, token = service
    tier = {"store": "pool", "service": "keeper", "service_url": url, "token_file": token, "deadline_s": 5.0}
    engine = engines(**tier)
    first = engine.tokens([1, 2, 3, 4])
    assert engine.generate(1) == (first[0], WHOLE * BLOCK_TOKENS)
    assert engine.ask("counts")["metrics"]["vllm:prompt_tokens_cached_by_source{source=p2p}"] == WHOLE * BLOCK_TOKENS
    other = engines(**tier)
    assert other.generate(2) == (first[1], WHOLE * BLOCK_TOKENS)
    process.send_signal(signal.SIGKILL)
    began_s = time.monotonic()
    assert engine.generate(2) == (first[1], 0)
    assert other.generate(3) == (first[2], 0)
    assert time.monotonic() - began_s < 30
    assert engine.tokens([3, 4]) == first[2:]
