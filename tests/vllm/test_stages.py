"""Engines of unequal pipeline stages in real vLLM: layers that one rank keeps here two keep there, beside tensor
parallel ranks. Eight more processes: only with `RANKS=1`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.vllm.checks import STARVED, TRIES, prompt, wait_free
from tests.support.vllm.engines import Cluster, Engine, both_legs, hand_over

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.skipif(os.environ.get("RANKS") != "1", reason="RANKS=1 starts engines of two ranks"),
]
LAYERS = 4
EXTENDED = {"worker_extension_cls": "tests.support.vllm.worker_digests.WorkerDigests"}
"""Of both engines of a pair: with an operator's code in one of them, they are not alike."""
MP = {
    **EXTENDED,
    "distributed_executor_backend": "mp",
    "enforce_eager": False,  # vLLM's CPU workers hand over between stages only so
    "compilation_config": {"mode": 2, "backend": "eager"},
}
STAGES = {"p1": "", "d1": "", "p2": "1,4", "p3": "2,4", "d2": "2,4", "dt": ""}
"""Where the stages of each engine end."""
MOVED: list[tuple[str, str, str]] = []
"""Prefill engine, decode engine and transfer id of what was loaded. The bytes are compared at the end: to ask workers
for them is to run an operator's code in them, which makes their weights unknown."""
RANKS = {"p1": 1, "d1": 1, "p2": 2, "p3": 2, "d2": 2, "dt": 2}
PAIRS = pytest.mark.parametrize("names", [("p2", "d1"), ("p1", "d2"), ("p2", "d2"), ("p2", "dt")], ids="-".join)


@pytest_asyncio.fixture(loop_scope="package", scope="module")
async def staged(cluster: Cluster) -> AsyncIterator[Cluster]:
    uneven = {"VLLM_PP_LAYER_PARTITION": "1,3"}
    await cluster.start(
        "p2", "kv_producer", environment=uneven, max_num_batched_tokens=512, pipeline_parallel_size=2, **MP
    )
    await cluster.start("p1", "kv_producer", max_num_batched_tokens=512, **EXTENDED)
    await cluster.start("d1", "kv_consumer", **EXTENDED)
    await cluster.start("d2", "kv_consumer", pipeline_parallel_size=2, **MP)
    await cluster.start("dt", "kv_consumer", tensor_parallel_size=2, **MP)
    names = ("p1", "d1", "p2", "d2", "dt")
    for name in names:
        await cluster[name].wait_ready()
    yield cluster
    for name in names:
        await cluster.engines.pop(name).stop()


def legs_of(prefill: Engine, decode: Engine) -> tuple[dict[str, Any], dict[str, Any]]:
    """What kvxfer's router gives both legs."""
    legs = both_legs(prefill, decode, (RANKS[prefill.name], RANKS[decode.name]))
    for leg in legs:
        leg["source"]["stages"] = STAGES[prefill.name]
    return legs


def by_layer(engine: Engine, ranks: list[dict[str, list[list[str]]]], key: str) -> dict[int, list[str]]:
    """By layer of the model, what that engine's ranks say of their pages of a transfer."""
    ends = [int(end) for end in STAGES[engine.name].split(",")] if STAGES[engine.name] else [LAYERS]
    found: dict[int, list[str]] = {}
    for begin, end, rank in zip([0, *ends], ends, ranks, strict=False):
        rows = [rows for name, rows in rank.items() if name.startswith(key)]
        assert len(rows) == 1, f"{engine.name} has {len(rows)} of {key}"
        assert len(rows[0]) == end - begin
        found |= dict(zip(range(begin, end), rows[0], strict=True))
    return found


async def moved(staged: Cluster, names: tuple[str, str], ids: list[int], n: int, *, at_once: bool) -> list[int]:
    """The answer of one prompt through both engines, which loaded it. A prompt whose source fell silent is computed,
    with the same answer, and comes again."""
    prefill, decode = (staged[name] for name in names)
    whole = await staged["mono"].generate(ids, n)
    for _ in range(TRIES):
        if at_once:
            legs = legs_of(prefill, decode)
            _, answer = await asyncio.gather(prefill.generate(ids, 1, legs[0]), decode.generate(ids, n, legs[1]))
        else:
            _, answer = await hand_over(prefill, decode, ids, n)
        assert answer.tokens == whole.tokens
        if answer.report["code"] == "":
            if decode.name != "dt":  # heads of other ranks lie in other pages
                MOVED.append((prefill.name, decode.name, answer.report["transfer_id"]))
            return whole.tokens
        assert answer.report["code"] in STARVED, answer.report["text"]
    raise AssertionError(f"the source fell silent in {TRIES} tries of {len(ids)} tokens: {answer.report['text']}")


@PAIRS
@pytest.mark.parametrize("length", [2, 129, 1900])
async def test_tokens_and_bytes_are_the_same(staged: Cluster, names: tuple[str, str], length: int) -> None:
    for at_once in (False, True):
        await moved(staged, names, prompt(length, seed=(names, at_once)), 20, at_once=at_once)
    for name in names:
        await wait_free(staged[name], within_s=10.0)


@PAIRS
async def test_eight_at_once_and_turns(staged: Cluster, names: tuple[str, str]) -> None:
    """Prompts of several lengths together, each with a second turn that begins with its answer."""

    async def talk(number: int) -> None:
        ids = prompt(20 + 37 * number, seed=f"{names} {number}")
        for _ in range(2):
            tokens = await moved(staged, names, ids, 8, at_once=True)
            ids = ids + tokens + prompt(5, seed=number)

    await asyncio.gather(*(talk(number) for number in range(8)))
    for name in names:
        await wait_free(staged[name], within_s=10.0)


@PAIRS
async def test_aborts_leave_no_block(staged: Cluster, names: tuple[str, str]) -> None:
    prefill, decode = (staged[name] for name in names)
    prefill.pause(0.01)
    for number in range(6):
        ids = prompt(1500, seed=f"{names} aborted {number}")
        legs = legs_of(prefill, decode)
        asked = [prefill.add(ids, 1, legs[0]), decode.add(ids, 8, legs[1])]
        await asyncio.sleep(0.02 * number)
        engine, request = ((prefill, asked[0]), (decode, asked[1]))[number % 2]
        await engine.abort(request)
        other, left = ((decode, asked[1]), (prefill, asked[0]))[number % 2]
        answer = await other.wait(left)
        if other is decode:
            whole = await staged["mono"].generate(ids, 8)
            assert answer.tokens == whole.tokens
    prefill.pause(0.0)
    await wait_free(prefill, within_s=10.0)
    await wait_free(decode, within_s=10.0)


@pytest.mark.parametrize("told", ["", "2,4", "3,4", "4,5"])
async def test_stages_that_are_not_the_sources_are_computed(staged: Cluster, told: str) -> None:
    """The answer is right, whatever the client says of them."""
    prefill, decode = staged["p2"], staged["d1"]
    ids = prompt(200, seed=f"told {told}")
    first = await prefill.generate(ids, 1, {"do_remote_decode": True, "do_remote_prefill": False})
    kv = {**first["kv"], "kvxfer": {**first["kv"]["kvxfer"], "stages": told}}
    whole = await staged["mono"].generate(ids, 12)
    answer = await decode.generate(ids, 12, kv)
    assert answer.tokens == whole.tokens
    assert answer.report["code"] in ("incompatible", "content_mismatch", "refused", "grant_unknown", *STARVED)
    await wait_free(prefill, within_s=10.0)


async def test_a_prefill_engine_that_is_killed_is_computed(staged: Cluster) -> None:
    """Both stages of the engine end."""
    prefill = await staged.start("p3", "kv_producer", max_num_batched_tokens=512, pipeline_parallel_size=2, **MP)
    await prefill.wait_ready()
    decode = staged["d2"]
    ids = prompt(1800, seed="killed")
    whole = await staged["mono"].generate(ids, 12)
    prefill.pause(0.05)
    legs = legs_of(prefill, decode)
    prefill.add(ids, 1, legs[0])
    asked = decode.add(ids, 12, legs[1])
    await asyncio.sleep(0.1)
    assert prefill.process is not None
    os.killpg(prefill.process.pid, signal.SIGKILL)
    answer = await decode.wait(asked)
    assert answer.tokens == whole.tokens
    assert answer.report["code"] != ""
    await wait_free(decode, within_s=10.0)


async def test_every_byte_was_the_sources(staged: Cluster) -> None:
    """The last test of this module: every block of every layer of what its tests loaded."""
    said = {name: await staged[name].ask("rank digests") for name in ("p2", "d2")}
    said |= {name: [await staged[name].ask("digests")] for name in ("p1", "d1")}
    assert MOVED
    for source, reader, transfer_id in MOVED:
        sent = by_layer(staged[source], said[source], f"{transfer_id}/source/")
        key = f"{transfer_id}/destination/"
        [first] = {int(name.removeprefix(key)) for rank in said[reader] for name in rank if name.startswith(key)}
        arrived = by_layer(staged[reader], said[reader], key)
        assert set(sent) == set(arrived) == set(range(LAYERS))
        for layer, rows in sent.items():
            assert arrived[layer] == rows[first:], f"{transfer_id} from {source} to {reader}, layer {layer}"
