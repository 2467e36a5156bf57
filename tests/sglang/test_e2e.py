"""A prefill and a decode server of SGLang answer what one server answers, behind a proxy and behind SGLang's own router
(`make test-sglang-e2e`).
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import pytest
import requests

from tests.support.sglang.cluster import TOKENS, Cluster, ask, prompt_of, tokens_of
from tests.support.sglang.servers import Router

pytestmark = pytest.mark.timeout(900)

LENGTHS = [1, 2, 15, 16, 17, 61, 255, 256, 257, 700, 1900]
"""Pages are of 16 tokens, chunks of 256."""
FEW = [1, 17, 256, 1900]
CLOSE = 1e-3
"""Between logarithms of probabilities whose batches were cut differently."""


@pytest.fixture(scope="module")
def router(cluster: Cluster) -> Iterator[Router]:
    router = Router(cluster.directory, cluster.prefill, cluster.decode)
    try:
        router.start()
        router.wait_ready()
        yield router
    finally:
        router.kill()


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_are_those_of_one_server(cluster: Cluster, length: int) -> None:
    prompt = prompt_of(length)
    answers = [ask(url, prompt, return_logprob=True) for url in (cluster.one.url, cluster.proxy.url, cluster.proxy.url)]
    wanted, found, again = map(tokens_of, answers)
    assert len(set(wanted)) > 1
    assert found == wanted
    assert again == wanted, "out of the prefix cache"
    sure, *others = ([one[0] for one in answer.json()["meta_info"]["output_token_logprobs"]] for answer in answers)
    assert len(sure) == TOKENS
    for other in others:
        assert other == pytest.approx(sure, abs=CLOSE)


def test_eight_at_once(cluster: Cluster) -> None:
    eight_at_once(cluster, cluster.proxy.url, seed=1)


@pytest.mark.parametrize("length", FEW)
def test_tokens_behind_the_router_are_those_of_one_server(cluster: Cluster, router: Router, length: int) -> None:
    prompt = prompt_of(length, seed=2)
    wanted = tokens_of(ask(cluster.one.url, prompt))
    assert tokens_of(ask(router.url, prompt)) == wanted
    assert tokens_of(ask(router.url, prompt)) == wanted, "out of the prefix cache"


def test_eight_at_once_behind_the_router(cluster: Cluster, router: Router) -> None:
    eight_at_once(cluster, router.url, seed=3)


def test_the_first_request_of_the_page(cluster: Cluster, router: Router) -> None:
    """OpenAI's API, a text, streamed and not."""
    body = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": TOKENS, "temperature": 0}
    texts = [
        requests.post(f"{url}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]
        for url in (cluster.one.url, router.url)
    ]
    assert texts[0] == texts[1] != ""
    with requests.post(f"{router.url}/v1/completions", json=body | {"stream": True}, timeout=120) as answer:
        assert answer.status_code == 200
        assert answer.text.rstrip().endswith("data: [DONE]")


def eight_at_once(cluster: Cluster, url: str, seed: int) -> None:
    prompts = [prompt_of(40 + 37 * index, seed) for index in range(8)]
    wanted = [tokens_of(ask(cluster.one.url, prompt)) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda prompt: tokens_of(ask(url, prompt)), prompts))
    assert found == wanted
