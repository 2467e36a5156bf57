"""Probes over real sockets: what they find out, and what they do not hold against a worker."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvxfer.errors import ConfigError
from kvxfer.openai.transfer_params import Part
from kvxfer.policy.health import HealthOptions
from kvxfer.router.fleet.probe import ProbeOptions, Prober
from kvxfer.router.fleet.worker import Worker, WorkerSource, stock_worker
from kvxfer.router.fleet.workers import Workers
from kvxfer.types import AgentRef, Load, Membership, Role
from tests.support.fleet import member
from tests.support.tiny_engine import TinyEngine, tiny_engines
from tests.support.upstream import until

FAST = ProbeOptions(probe_interval_s=0.05, probe_timeout_s=0.2, load_interval_s=0.05, identity_interval_s=30.0)
SLOW = ProbeOptions(probe_interval_s=60.0)


def named(engine: TinyEngine, name: str = "d0", dialect: str = "vllm", **more: Any) -> Worker:
    return stock_worker(engine.url, Role.DECODE, dialect, WorkerSource.FLAGS, name=name, **more)


@contextlib.asynccontextmanager
async def probed(*workers: Worker, options: ProbeOptions = FAST, **more: Any) -> AsyncIterator[Workers]:
    """A fleet that is probed, and leaves nothing behind."""
    before = asyncio.all_tasks()
    known = Workers(health=HealthOptions(eject_base_s=0.05, eject_cap_s=0.2, slow_start_s=0.3))
    known.replace(WorkerSource.FLAGS, workers)
    try:
        async with Prober(known, options, **more):
            yield known
    finally:
        await known.close()
    await until(lambda: asyncio.all_tasks() <= before)


def ref(workers: Workers, name: str = "d0") -> AgentRef:
    return next(one.ref for one in workers.members() if one.ref.agent_id == name)


def state(workers: Workers, name: str = "d0") -> str:
    return workers.states()[name].value


async def test_probe_learns_what_a_worker_serves_and_its_load() -> None:
    async with tiny_engines(1) as [engine], probed(named(engine)) as workers:
        await until(lambda: workers.candidates() and workers.candidates()[0].member.load.total_blocks)
        [candidate] = workers.candidates()
        assert (candidate.member.info.model, candidate.capacity.context_tokens) == ("m", 4096)
        assert candidate.member.load == Load(2, 3, 0, 75, 100)
        assert candidate.capacity.pool_tokens == 1600
        engine.pages["/metrics"] = engine.pages["/metrics"].replace(b"} 3", b"} 30")
        await until(lambda: workers.candidates()[0].member.load.running_requests == 30)
        assert engine.asked.count("/v1/models") == 1
        assert "/server_info" not in engine.asked


async def test_probe_asks_sglang_for_what_its_server_is() -> None:
    async with tiny_engines(1) as [engine]:
        engine.serves("m")
        engine.pages["/server_info"] = json.dumps({"context_length": 99, "page_size": 32}).encode()
        engine.pages["/metrics"] = (
            b"sglang:num_running_reqs 1\nsglang:max_total_num_tokens 3200\nsglang:token_usage 0.5\n"
        )
        async with probed(named(engine, dialect="sglang")) as workers:
            await until(lambda: workers.candidates() and workers.candidates()[0].member.load.total_blocks)
            [candidate] = workers.candidates()
            assert candidate.capacity.context_tokens == 99
            assert candidate.member.load == Load(0, 1, 0, 50, 100)


async def test_probe_of_an_engine_without_the_optional_pages_is_well() -> None:
    async with tiny_engines(1) as [engine]:
        del engine.pages["/metrics"], engine.pages["/health"]
        async with probed(named(engine, dialect="sglang")) as workers:
            await until(lambda: len(engine.asked) > 20)
            assert state(workers) == "in"
            assert workers.models() == ("m",)
            for page in ("/metrics", "/server_info", "/get_server_info"):
                assert engine.asked.count(page) == 1  # not asked for again at once


async def test_probe_without_an_answer_about_models_offers_no_worker_and_says_why() -> None:
    async with tiny_engines(1) as [engine]:
        engine.statuses["/v1/models"] = 401
        async with probed(named(engine), headers=lambda worker: [(b"authorization", b"Bearer k")]) as workers:
            await until(lambda: "401" in workers.why_none())
            assert workers.candidates() == ()
            assert engine.headers[0]["authorization"] == "bearer k"
            del engine.statuses["/v1/models"]
            await until(workers.candidates)
            assert workers.why_none() == "no worker is known"
            assert workers.describe()[0]["trouble"] == ""


async def test_probe_finds_a_dead_worker_within_a_second_and_its_return() -> None:
    async with tiny_engines(1) as [engine], probed(named(engine), options=ProbeOptions()) as workers:
        await until(workers.candidates)
        begun_s = time.monotonic()
        await engine.down()
        await until(lambda: state(workers) == "out")
        assert time.monotonic() - begun_s < 1.5
        assert workers.candidates()[0].is_last_choice
        await engine.up()
        await until(lambda: state(workers) == "half_open")
        with workers.claim(ref(workers), Part.DECODE, "r"):
            workers.succeeded(ref(workers), "r")
        assert state(workers) == "slow_start"
        await until(lambda: state(workers) == "in")


@pytest.mark.parametrize("mode", ["hang", "reset", "babble", "5xx"])
async def test_probe_that_fails_three_times_in_a_row_ejects(mode: str) -> None:
    async with tiny_engines(1) as [engine], probed(named(engine, model="m")) as workers:
        await until(lambda: "/health" in engine.asked)
        if mode == "5xx":
            engine.statuses["/health"] = 503
        else:
            engine.mode = mode
        await until(lambda: state(workers) == "out")
        assert workers.counters.probes["d0", "probe_failed"] >= 3
        assert workers.counters.ejections == {("d0", "probe_failed"): 1}
        engine.mode = "answer"
        engine.statuses.clear()
        await until(lambda: state(workers) == "half_open")


async def test_probe_of_a_worker_that_was_away_learns_anew_what_it_serves() -> None:
    async with tiny_engines(1) as [engine], probed(named(engine)) as workers:
        await until(workers.candidates)
        await engine.down()
        await until(lambda: state(workers) == "out")
        engine.serves("another")
        await engine.up()
        await until(lambda: state(workers) == "half_open")
        assert workers.models() == ("another",)


async def test_probe_of_a_doubted_worker_is_at_once() -> None:
    async with tiny_engines(1) as [engine], probed(named(engine, model="m"), options=SLOW) as workers:
        await until(lambda: workers.counters.probes)
        for number in range(500):
            workers.failed(ref(workers), "unread", f"r{number}")
        await until(lambda: engine.asked.count("/health") == 2)
        await until(lambda: workers.entries()[0].health.is_plain)
        assert state(workers) == "in"
        await engine.down()
        workers.failed(ref(workers), "unread", "r")
        await until(lambda: state(workers) == "out")


async def test_probe_that_began_before_a_doubt_does_not_end_it() -> None:
    async with tiny_engines(1) as [engine]:
        may_answer = engine.gates["/v1/models"] = asyncio.Event()
        async with probed(named(engine), options=SLOW) as workers:
            await until(lambda: "/v1/models" in engine.asked)  # so it has answered that it is well
            workers.failed(ref(workers), "unread", "r")
            may_answer.set()
            await until(lambda: workers.entries()[0].health.is_plain)
            assert engine.asked.count("/health") == 2


async def test_probe_leaves_workers_with_a_lease_alone_until_they_are_ejected() -> None:
    async with tiny_engines(1) as [engine], probed() as workers:
        workers.update(Membership(1, (member("d0", port=engine.port),)))
        await asyncio.sleep(0.3)
        assert engine.asked == []
        workers.failed(ref(workers), "unreachable")
        await until(lambda: state(workers) == "half_open")
        assert set(engine.asked) == {"/health"}
        with workers.claim(ref(workers), Part.DECODE, "r"):
            workers.succeeded(ref(workers), "r")
        count = len(engine.asked)
        await asyncio.sleep(0.3)
        assert len(engine.asked) <= count + 1


async def test_probe_of_a_doubted_worker_with_a_lease_reads_its_count_of_tokens() -> None:
    async with tiny_engines(1) as [engine], probed() as workers:
        workers.update(Membership(1, (member("d0", port=engine.port),)))
        engine.pages["/metrics"] = b'vllm:num_requests_running 1\nvllm:generation_tokens_total{engine="0"} 7\n'
        [entry] = workers.entries()
        load = entry.worker.member.load
        assert entry.worked_s is None
        workers.failed(ref(workers), "silent", "r")
        await until(lambda: entry.worked_s is not None)
        first_s = entry.worked_s
        assert entry.worker.member.load is load  # its heartbeats say that
        engine.pages["/metrics"] = b'vllm:generation_tokens_total{engine="0"} 9\n'
        await asyncio.sleep(2 * FAST.load_interval_s)
        workers.failed(ref(workers), "silent", "r")
        await until(lambda: entry.worked_s != first_s)
        assert not entry.health.is_doubted


async def test_probe_of_one_that_hangs_delays_no_other() -> None:
    options = ProbeOptions(probe_interval_s=0.05, probe_timeout_s=5.0)
    async with tiny_engines(8) as engines:
        for engine in engines[:7]:
            engine.mode = "hang"
        workers = [named(engine, f"d{n}", model="m") for n, engine in enumerate(engines)]
        async with probed(*workers, options=options):
            await until(lambda: engines[7].asked.count("/health") > 10, seconds=4)
            assert all(engine.asked == ["/health"] for engine in engines[:7])


async def test_probe_that_lacks_descriptors_blames_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tiny_engines(1) as [engine], probed(named(engine, model="m")) as workers:
        await until(lambda: "/health" in engine.asked)

        async def out_of_descriptors(*arguments: Any, **more: Any) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as broken:
            broken.setattr(asyncio.get_running_loop(), "create_connection", out_of_descriptors)
            await engine.down()
            await asyncio.sleep(0.5)
            assert state(workers) == "in"
        await until(lambda: state(workers) == "out")


async def test_probe_follows_what_sources_say() -> None:
    async with tiny_engines(2) as [one, other], probed(named(one)) as workers:
        await until(lambda: "/metrics" in one.asked)
        workers.replace(WorkerSource.FLAGS, [named(other, "d1")])
        await until(lambda: workers.models() == ("m",))
        assert [candidate.agent_id for candidate in workers.candidates()] == ["d1"]
        count = len(one.asked)
        await until(lambda: len(other.asked) > 10)
        assert len(one.asked) <= count + 3  # what was under way


async def test_pool_of_an_address_is_closed_when_its_last_worker_and_request_are_gone() -> None:
    async with tiny_engines(1) as [engine]:
        workers = Workers()
        workers.replace(WorkerSource.FLAGS, [named(engine, model="m")])
        at = ref(workers)
        pool = workers.pool(at)
        assert workers.pool(at) is pool
        engine.mode = "hang"
        with workers.claim(at, Part.DECODE):
            request = asyncio.create_task(pool.request("GET", "/health"))
            await until(lambda: pool.counters.in_flight)
            workers.replace(WorkerSource.FLAGS, [])
            assert (workers.statistics().pools, workers.statistics().pools_retired) == (0, 1)
            assert workers.pool(at) is pool  # what runs goes on
            request.cancel()
            await asyncio.wait([request])
        await until(lambda: pool.counters.open == 0)
        assert (workers.statistics().pools, workers.statistics().pools_retired) == (0, 0)
        await workers.close()


def test_probe_options_are_checked() -> None:
    for wrong in ({"probe_interval_s": 0.0}, {"probe_timeout_s": -1.0}, {"probes_max": 0}):
        with pytest.raises(ConfigError):
            ProbeOptions(**wrong)  # type: ignore[arg-type]


def listed(*engines: TinyEngine, model: str = "") -> Worker:
    """A pod at the addresses of all of them, in that order."""
    first = stock_worker(engines[0].url, Role.DECODE, "vllm", WorkerSource.KUBERNETES, name="d0", model=model)
    return dataclasses.replace(first, addresses=tuple(engine.url for engine in engines))


@pytest.mark.parametrize("first", ["refuses", "hangs", "is another server", "fails"])
async def test_probe_finds_the_address_of_a_pod_that_answers(first: str) -> None:
    async with tiny_engines(2) as [wrong, engine]:
        if first == "refuses":
            await wrong.down()
        elif first == "hangs":
            wrong.mode = "hang"
        elif first == "fails":
            wrong.statuses = dict.fromkeys(wrong.pages, 500)
        else:
            del wrong.pages["/v1/models"]
        async with probed(listed(wrong, engine)) as workers:
            known = ref(workers)
            await until(lambda: workers.candidates())
            assert workers.worker(known).url == engine.url
            assert state(workers) == "in"
            assert workers.pool(known).address == engine.url.removeprefix("http://")
            # Its source lists it again, in another order: it stays where it answers.
            for again in (listed(wrong, engine), listed(engine, wrong)):
                workers.replace(WorkerSource.FLAGS, [again])
                assert (ref(workers), workers.worker(known).url, len(workers.candidates())) == (known, engine.url, 1)


async def test_probe_moves_a_pod_whose_address_went_away_and_moves_it_no_further() -> None:
    async with tiny_engines(2) as [first, second], probed(listed(first, second)) as workers:
        await until(lambda: workers.candidates())
        known = ref(workers)
        assert workers.worker(known).url == first.url
        asked = len(second.asked)
        await first.down()
        await until(lambda: workers.worker(known).url == second.url)
        assert asked == 0
        assert ref(workers) == known
        await until(lambda: workers.candidates()[0].member.load.total_blocks)
        asked = len(second.asked)
        await until(lambda: len(second.asked) > asked + 3)
        assert workers.worker(known).url == second.url
