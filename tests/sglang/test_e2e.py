"""A prefill and a decode server of SGLang behind a proxy answer what one server answers (`make test-sglang-e2e`)."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from servers import Proxy, Server, make_tiny_llama

pytestmark = pytest.mark.timeout(900)

LENGTHS = [1, 2, 15, 16, 17, 61, 255, 256, 257, 700, 1900]
"""Pages are of 16 tokens, chunks of 256."""
TOKENS = 12
GONE_S = 3.0
ENDED_S = 60.0
"""SGLang looks each 5 s whether it is to end, and gives its schedulers 15 s."""


def ask(url: str, prompt: list[int], *, tokens: int = TOKENS) -> requests.Response:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }
    return requests.post(f"{url}/generate", json=body, timeout=120)


def tokens_of(answer: requests.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    value: Any = answer.json()
    return list(value["output_ids"])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(3, 400), k=length)


class Cluster:
    def __init__(self, directory: pathlib.Path) -> None:
        model = make_tiny_llama(directory / "tiny")
        self.directory, self.model = directory, model
        self.prefill = Server(directory, model, "prefill")
        self.decode = Server(directory, model, "decode", bootstrap=self.prefill.bootstrap)
        self.one = Server(directory, model, "", "--disable-radix-cache")
        self.proxy = Proxy(self.prefill, self.decode)

    @property
    def servers(self) -> tuple[Server, ...]:
        return self.prefill, self.decode, self.one


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("servers"))
    try:
        for server in cluster.servers:  # one after the other: each imports for seconds
            server.start()
            server.wait_ready()
        yield cluster
    finally:
        for server in cluster.servers:
            server.kill()


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_are_those_of_one_server(cluster: Cluster, length: int) -> None:
    prompt = prompt_of(length)
    wanted = tokens_of(ask(cluster.one.url, prompt))
    assert len(set(wanted)) > 1
    assert tokens_of(ask(cluster.proxy.url, prompt)) == wanted
    assert tokens_of(ask(cluster.proxy.url, prompt)) == wanted, "out of the prefix cache"


def test_eight_at_once(cluster: Cluster) -> None:
    prompts = [prompt_of(40 + 37 * index, seed=1) for index in range(8)]
    wanted = [tokens_of(ask(cluster.one.url, prompt)) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda prompt: tokens_of(ask(cluster.proxy.url, prompt)), prompts))
    assert found == wanted


def figure(server: Server, name: str, *labels: str) -> float:
    """The sum of what its ``/metrics`` has of that name, and those labels."""
    lines = requests.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    found = [line for line in lines if line.startswith(name + "{") and all(label in line for label in labels)]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_figures_are_among_sglangs_own(cluster: Cluster) -> None:
    committed = 'outcome="committed"'
    before = figure(cluster.decode, "sglang:kvxfer_loads_total", committed, 'engine_type="decode"', 'tp_rank="0"')
    bytes_before = figure(cluster.decode, "sglang:kvxfer_bytes_total")
    tokens_of(ask(cluster.proxy.url, prompt_of(256, seed=5)))
    assert figure(cluster.decode, "sglang:kvxfer_loads_total", committed) == before + 1
    pages = 256 // 16 * 3 * 2 * (16 * 2 * 16 * 4)
    assert pages < figure(cluster.decode, "sglang:kvxfer_bytes_total") - bytes_before < pages + 2**16
    assert figure(cluster.prefill, "sglang:kvxfer_sends_total", committed, 'engine_type="prefill"') >= before + 1
    assert figure(cluster.prefill, "sglang:kv_transfer_latency_ms_count") >= before + 1
    assert figure(cluster.decode, "kvxfer_transfer_bytes_total") >= pages
    wait_s = time.monotonic() + 3
    while figure(cluster.decode, "sglang:kvxfer_rooms") and time.monotonic() < wait_s:
        time.sleep(0.2)
    assert figure(cluster.decode, "sglang:kvxfer_rooms") == figure(cluster.prefill, "sglang:kvxfer_rooms") == 0


def test_aborts_in_flight_leave_no_page_behind(cluster: Cluster) -> None:
    prompts = [prompt_of(600, seed=seed) for seed in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, cluster.proxy.url, prompt, tokens=400) for prompt in prompts]
        time.sleep(0.3)
        for server in (cluster.decode, cluster.prefill):
            requests.post(f"{server.url}/abort_request", json={"abort_all": True}, timeout=10)
        for future in asked:
            future.result()
    prompt = prompt_of(300, seed=9)
    assert tokens_of(ask(cluster.proxy.url, prompt)) == tokens_of(ask(cluster.one.url, prompt))
    time.sleep(1)
    for server in (cluster.decode, cluster.prefill):  # SGLang's idle loop checks that every page is accounted for
        assert server.process is not None
        assert server.process.poll() is None, server.last_words()
        assert "memory leak" not in server.log.read_text(errors="replace").lower()


def test_a_killed_prefill_server_is_told_of_and_comes_back(cluster: Cluster) -> None:
    cluster.prefill.kill()
    for _ in range(2):
        begun_s = time.monotonic()
        answer = ask(cluster.proxy.url, prompt_of(50))
        assert answer.status_code != 200
        assert time.monotonic() - begun_s < GONE_S, answer.text
    cluster.prefill.start()
    cluster.prefill.wait_ready()
    prompt = prompt_of(90)
    assert tokens_of(ask(cluster.proxy.url, prompt)) == tokens_of(ask(cluster.one.url, prompt))


def test_a_killed_decode_server_comes_back(cluster: Cluster) -> None:
    cluster.decode.kill()
    assert ask(cluster.proxy.url, prompt_of(50)).status_code != 200
    cluster.decode.start()
    cluster.decode.wait_ready()
    prompt = prompt_of(120)
    assert tokens_of(ask(cluster.proxy.url, prompt)) == tokens_of(ask(cluster.one.url, prompt))


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
    os.kill(process.pid, signal.SIGTERM)
    process.wait(ENDED_S)
    said = cluster.prefill.log.read_text(errors="replace")[before:]
    assert "tells its peers" in said
    assert "killing them" not in said
    begun_s = time.monotonic()
    assert ask(cluster.proxy.url, prompt_of(50)).status_code != 200
    assert time.monotonic() - begun_s < GONE_S
