"""Real servers are paused while prompts wait, for longer than a silent engine would count as alive, and continue: no
request fails, and the tokens are those of one server (`make test-sglang-e2e`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Iterator

import pytest
import requests

from kvxfer.connectors.sglang.options import Options
from tests.support.sglang.cluster import TOKENS, Cluster, ask, prompt_of, tokens_of
from tests.support.sglang.servers import Server

pytestmark = pytest.mark.timeout(900)

LONGER_S = Options.engine_silent_s + 3.0
"""An engine that has work and makes no step is given up before."""
LENGTHS = [1900, 700, 300, 40]
MANY = 200


def control(server: Server, path: str, **body: object) -> None:
    answer = requests.post(f"{server.url}/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


def requests_at(server: Server) -> int:
    """Prompts that it has computed, by its own log."""
    return server.log.read_text(errors="replace").count('"POST /generate HTTP/1.1" 200')


@contextlib.contextmanager
def paused(server: Server, mode: str) -> Iterator[None]:
    control(server, "pause_generation", mode=mode)
    try:
        yield
    finally:
        control(server, "continue_generation")


@pytest.fixture
def wanted(cluster: Cluster, request: pytest.FixtureRequest) -> list[tuple[list[int], list[int]]]:
    """Prompts that no prefix cache has, with the tokens of one server."""
    seed = abs(hash(request.node.name)) % 10**6
    prompts = [prompt_of(length, seed) for length in LENGTHS]
    return [(prompt, tokens_of(ask(cluster.one.url, prompt))) for prompt in prompts]


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_prefill_is_paused(cluster: Cluster, wanted: list[tuple[list[int], list[int]]], mode: str) -> None:
    """Half of the prompts have reached its scheduler, unless that would abort them; the others wait before it."""
    with concurrent.futures.ThreadPoolExecutor(len(wanted)) as pool:
        send = lambda some: [pool.submit(ask, cluster.proxy.url, prompt) for prompt, _ in some]  # noqa: E731
        sent = [] if mode == "abort" else send(wanted[:2])
        with paused(cluster.prefill, mode):
            sent += send(wanted[len(sent) :])
            time.sleep(LONGER_S)
            assert not sent[-1].done(), "it waits before the scheduler"
        answers = [tokens_of(one.result()) for one in sent]
    assert answers == [tokens for _, tokens in wanted]
    cluster.wait_returned()
    cluster.check_pools()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("pause_s", [1.0, LONGER_S])
def test_decode_is_paused_while_it_generates(cluster: Cluster, mode: str, pause_s: float) -> None:
    """In mode ``retract`` it gives every page back, and asks prefill for each prompt again, over the same room."""
    prompts = [prompt_of(length, seed=int(pause_s) * 10 + len(mode)) for length in (30, 90, 250, 600)]
    wanted = [tokens_of(ask(cluster.one.url, prompt, tokens=MANY)) for prompt in prompts]
    before = requests_at(cluster.prefill)
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        sent = [pool.submit(ask, cluster.proxy.url, prompt, tokens=MANY) for prompt in prompts]
        deadline_s = time.monotonic() + 60
        while cluster.decode.used_tokens().tokens < sum(map(len, prompts)) + 8 * TOKENS:
            assert time.monotonic() < deadline_s, "they do not generate"
            time.sleep(0.02)
        with paused(cluster.decode, mode):
            time.sleep(pause_s)
            assert not any(one.done() for one in sent)
        answers = [tokens_of(one.result()) for one in sent]
    assert answers == wanted
    again = len(prompts) if mode == "retract" else 0
    assert requests_at(cluster.prefill) - before == len(prompts) + again
    cluster.wait_returned()
    cluster.check_pools()


def test_both_are_paused(cluster: Cluster, wanted: list[tuple[list[int], list[int]]]) -> None:
    with concurrent.futures.ThreadPoolExecutor(len(wanted)) as pool:
        sent = [pool.submit(ask, cluster.proxy.url, prompt) for prompt, _ in wanted]
        with paused(cluster.decode, "retract"), paused(cluster.prefill, "retract"):
            time.sleep(2.0)
        answers = [tokens_of(one.result()) for one in sent]
    assert answers == [tokens for _, tokens in wanted]
    cluster.wait_returned()
    cluster.check_pools()
