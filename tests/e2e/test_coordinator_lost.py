"""The coordinator dies and comes back: the data path does not notice, and all processes find it again."""

from __future__ import annotations

import pytest

from tests.support.e2e.client import Stream, ask, completion
from tests.support.e2e.cluster import Cluster, until
from tests.support.e2e.reference import make_prompt

pytestmark = pytest.mark.asyncio(loop_scope="package")

TOKENS = 16
STREAMED = 1500
LOST_S = 10.0
"""dead_after_s of silence (3 s) at the latest; a broken connection says it at once."""
FOUND_S = 20.0
"""The longest back-off between two attempts, and the attempt."""


@pytest.fixture
def cluster(slow_cluster: Cluster) -> Cluster:
    return slow_cluster


async def heard(cluster: Cluster, is_heard: bool, within_s: float) -> None:
    """Wait until every worker and the router hear the coordinator, or none does."""

    async def agree() -> bool:
        agents = [(await cluster.statistics(name))["agent"] for name in cluster.workers]
        return all(agent["is_coordinator_connected"] is is_heard for agent in agents)

    await until(agree, f"is_coordinator_connected is {is_heard} everywhere", within_s=within_s)


async def check_remote(cluster: Cluster, reference, seed: int, length: int = 150) -> None:
    prompt = make_prompt(length, seed=seed)
    answer = await ask(cluster.url("router"), completion(prompt, TOKENS, "slow"))
    assert answer.status == 200, answer.body
    assert (answer.prefill, answer.account["prefill"], answer.account["failure"]) == ("remote", "remote", None)
    reference.check(answer.token_ids, prompt, TOKENS)


async def test_dies_and_comes_back(cluster: Cluster, slow_reference) -> None:
    """No request before it dies: the two workers meet for the first time without a coordinator."""
    await heard(cluster, True, within_s=FOUND_S)
    prompt = make_prompt(200, seed=1)
    before = await cluster.directory()
    in_flight = Stream(cluster.url("router"), completion(prompt, STREAMED, "slow"))
    pulling = Stream(cluster.url("router"), completion(make_prompt(1500, seed=2), TOKENS, "slow"))
    await cluster.mid_pull("d1", "p1", blocks=4)
    await cluster.kill("coordinator")
    await heard(cluster, False, within_s=LOST_S)
    assert not (await in_flight_done(in_flight)), "the stream must outlast the coordinator; make it longer"
    await check_remote(cluster, slow_reference, seed=3)
    answer = await pulling.rest()
    assert (answer.is_done, answer.account["prefill"]) == (True, "remote"), answer.account
    slow_reference.check(answer.token_ids, make_prompt(1500, seed=2), TOKENS)
    answer = await in_flight.rest()
    assert answer.is_done
    assert len(answer.token_ids) == STREAMED
    slow_reference.check(answer.token_ids[:200], prompt, 200)
    await check_remote(cluster, slow_reference, seed=4)
    await cluster.assert_drained()

    await cluster.restart("coordinator")
    await heard(cluster, True, within_s=FOUND_S)
    await cluster.seen("p1", "d1")
    after = await cluster.directory()
    assert {n: e["incarnation"] for n, e in after.items()} == {n: e["incarnation"] for n, e in before.items()}
    await check_remote(cluster, slow_reference, seed=5)
    await cluster.assert_drained()


async def in_flight_done(stream: Stream) -> bool:
    return stream.answer is not None and stream.answer.is_done
