"""A tier of kvxfer's in real vLLM: an evicted prefix comes back and is not computed again, and what goes wrong is
computed, by name. The tokens are always those of the same engine's first, computed answer."""

from __future__ import annotations

import asyncio
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.vllm.engines import Cluster
from tests.support.vllm.tiered import ALL, FILE, WHOLE, Driven, TierProcess, Within, files


@pytest.fixture
def engines(tmp_path: pathlib.Path, tiny_model: pathlib.Path) -> Iterator[Any]:
    started: list[Driven] = []

    def start(**tier: Any) -> Driven:
        started.append(Driven(tiny_model, tier, tmp_path / f"engine-{len(started)}.log"))
        return started[-1].wait_ready()

    yield start
    for engine in started:
        engine.end()


def test_evicted_prefixes_come_back_from_files_and_wrong_files_are_computed(
    engines: Any, tmp_path: pathlib.Path
) -> None:
    store = {"store": "file", "path": str(tmp_path / "kv"), "capacity_bytes": 64 * FILE}
    engine = engines(**store)
    first = engine.tokens([1, 2, 3, 4])
    assert engine.generate(1) == (first[0], ALL)
    metrics = engine.metrics()
    assert metrics["vllm:prompt_tokens_cached_by_source{source=disk}"] == ALL
    assert metrics["vllm:kvxfer_tier_loaded_blocks{}"] == WHOLE
    for path in files(tmp_path / "kv"):  # of every prompt
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert engine.generate(2) == (first[1], 0)
    assert engine.errors() == {"load block_damaged": WHOLE}
    engine.tokens([3, 4])
    assert engine.generate(2) == (first[1], ALL)  # it was stored again
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
    assert engine.generate(4) == (first[3], ALL)
    assert engine.generate(1) == (first[0], 0)
    assert sum(path.stat().st_size for path in files(tmp_path / "kv")) <= 20 * FILE


@pytest.mark.nightly
def test_a_store_without_room_is_named_and_computed(engines: Any, tmp_path: pathlib.Path) -> None:
    engine = engines(store="file", path=str(tmp_path / "kv"), capacity_bytes=FILE - 1)
    first = engine.tokens([1, 2, 3, 4])
    assert engine.generate(1) == (first[0], 0)
    assert engine.errors()["save store_full"] >= 3 * WHOLE


@pytest.mark.nightly
def test_evicted_prefixes_come_back_from_another_process_and_are_computed_once_it_is_killed(
    engines: Any, tmp_path: pathlib.Path
) -> None:
    service = TierProcess(tmp_path)
    tier = {**service.tier, "deadline_s": 5.0}
    engine = engines(**tier)
    engine.wait_attached()
    first = engine.tokens([1, 2, 3, 4])
    assert engine.generate(1) == (first[0], ALL)
    assert engine.metrics()["vllm:prompt_tokens_cached_by_source{source=p2p}"] == ALL
    other = engines(**tier)
    other.wait_attached()
    assert other.generate(2) == (first[1], ALL)
    service.signal(signal.SIGKILL)
    with Within(30):
        assert engine.generate(2) == (first[1], 0)
        assert other.generate(3) == (first[2], 0)
    assert engine.tokens([3, 4]) == first[2:]
    service.end()


@pytest.mark.nightly
@pytest.mark.asyncio
async def test_a_pool_that_a_coordinator_names_serves_one_engine_after_the_other(
    engines: Any, tmp_path: pathlib.Path, tiny_model: pathlib.Path
) -> None:
    """The second engine does not compute what the first one stored before it ended."""
    async with Cluster(tmp_path, tiny_model) as cluster:
        address = cluster.address
        service = TierProcess(tmp_path, f"--coordinator={address}", token="cluster-token")
        tier = {"store": "pool", "service": "keeper", "coordinator": address, "token_file": service.token}

        def one_after_the_other() -> None:
            engine = engines(**tier)
            engine.wait_attached()
            first = engine.tokens([1, 2, 3])
            assert engine.metrics()["vllm:kvxfer_tier_saved_blocks{}"] == 3 * WHOLE
            engine.end()
            assert service.metrics()["kvxfer_tier_blocks"] == 3 * WHOLE
            other = engines(**tier)
            other.wait_attached()
            assert [other.generate(seed) for seed in (1, 2, 3)] == [(tokens, ALL) for tokens in first]
            metrics = other.metrics()
            assert metrics["vllm:prompt_tokens_cached_by_source{source=p2p}"] == 3 * ALL
            assert metrics["vllm:kvxfer_tier_loaded_blocks{}"] == 3 * WHOLE
            assert other.errors() == {}
            assert service.metrics()["kvxfer_tier_served_blocks_total"] == 3 * WHOLE

        await asyncio.to_thread(one_after_the_other)
        service.end()
