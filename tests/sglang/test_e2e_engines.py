"""Real servers that are cut differently, that count what they move, and that are told to end (`make
test-sglang-e2e`).
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import requests

from tests.support.sglang.cluster import GONE_S, Cluster, ask, prompt_of, tokens_of
from tests.support.sglang.servers import Proxy, Router, Server

pytestmark = pytest.mark.timeout(900)

LENGTHS = [1, 2, 15, 16, 17, 61, 255, 256, 257, 700, 1900]
ENDED_S = 60.0
"""SGLang looks each 5 s whether it is to end, and gives its schedulers 15 s."""


def figure(server: Server, name: str, *labels: str) -> float:
    """The sum of what its ``/metrics`` has of that name, and those labels."""
    lines = requests.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    found = [line for line in lines if line.startswith(name + "{") and all(label in line for label in labels)]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_figures_are_among_sglangs_own(cluster: Cluster) -> None:
    committed = 'outcome="committed"'
    before = figure(cluster.decode, "sglang:kvxfer_loads_total", committed, 'engine_type="decode"', 'tp_rank="0"')
    bytes_before = figure(cluster.decode, "sglang:kvxfer_bytes_total")
    sends_before = figure(cluster.prefill, "sglang:kvxfer_sends_total", committed)
    tokens_of(ask(cluster.proxy.url, prompt_of(256, seed=5)))
    assert figure(cluster.decode, "sglang:kvxfer_loads_total", committed) == before + 1
    pages = 256 // 16 * 3 * 2 * (16 * 2 * 16 * 4)
    assert pages < figure(cluster.decode, "sglang:kvxfer_bytes_total") - bytes_before < pages + 2**16
    assert figure(cluster.prefill, "sglang:kvxfer_sends_total", committed, 'engine_type="prefill"') == sends_before + 1
    assert figure(cluster.prefill, "sglang:kv_transfer_latency_ms_count") >= 1
    assert figure(cluster.decode, "kvxfer_transfer_bytes_total") >= pages
    wait_s = time.monotonic() + 3
    while figure(cluster.decode, "sglang:kvxfer_rooms") and time.monotonic() < wait_s:
        time.sleep(0.2)
    assert figure(cluster.decode, "sglang:kvxfer_rooms") == figure(cluster.prefill, "sglang:kvxfer_rooms") == 0


def test_several_answers_are_the_clients_own_fault(cluster: Cluster) -> None:
    """SGLang's own router is in front. A 500 would open the servers' circuit in it after a few such requests."""
    prompt = prompt_of(61, seed=9)
    router = Router(cluster.directory, cluster.prefill, cluster.decode)
    router.start()
    try:
        router.wait_ready()
        for stream in (False, True):
            for _ in range(6):
                body = {"model": "m", "prompt": "hello world", "max_tokens": 2, "n": 2, "stream": stream}
                answer = requests.post(f"{router.url}/v1/completions", json=body, timeout=60)
                assert answer.status_code == 400, answer.text
                assert "n: a prefill and a decode server give one answer to a prompt" in answer.text
                sampled = {"input_ids": prompt, "sampling_params": {"n": 3, "max_new_tokens": 2}}
                answer = requests.post(f"{router.url}/generate", json=sampled, timeout=60)
                assert answer.status_code == 400, answer.text
        assert tokens_of(ask(router.url, prompt)) == tokens_of(ask(cluster.one.url, prompt))
    finally:
        router.kill()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="SGLang binds each rank to a processor of its own")
def test_a_decode_server_that_is_cut_differently(cluster: Cluster) -> None:
    """Two ranks, pages of half the size, and a prefix cache that ends within pages of prefill's."""
    flags = ("--page-size", "8", "--disaggregation-decode-enable-radix-cache")
    other = Server(cluster.directory, cluster.model, "decode", *flags, bootstrap=cluster.prefill.bootstrap, tp=2)
    cluster.decode.kill()
    other.start()
    try:
        other.wait_ready()
        url = Proxy(cluster.prefill, other).url
        for length in LENGTHS:
            prompt = prompt_of(length, seed=2)
            assert tokens_of(ask(url, prompt)) == tokens_of(ask(cluster.one.url, prompt)), length
        begun = prompt_of(200, seed=3)
        for known in (8, 24, 40, 100):
            prompt = begun[:known] + prompt_of(61, seed=known)
            for _ in range(2):
                assert tokens_of(ask(url, prompt)) == tokens_of(ask(cluster.one.url, prompt)), known
    finally:
        other.kill()
        cluster.decode.start()
        cluster.decode.wait_ready()


def test_a_server_that_is_ended_tells_its_peers(cluster: Cluster) -> None:
    process = cluster.prefill.process
    assert process is not None
    before = len(cluster.prefill.log.read_text(errors="replace"))
    try:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(ENDED_S)
        said = cluster.prefill.log.read_text(errors="replace")[before:]
        assert "tells its peers" in said
        assert "killing them" not in said
        begun_s = time.monotonic()
        assert ask(cluster.proxy.url, prompt_of(50)).status_code != 200
        assert time.monotonic() - begun_s < GONE_S
    finally:  # the tests that follow share it
        cluster.prefill.start()
        cluster.prefill.wait_ready()
