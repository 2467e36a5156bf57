"""kvxfer's router in front of two stock `vllm serve` with NixlConnector, unchanged, on NVIDIA's own NIXL (`--prefill
URL --decode URL --dialect vllm`): what the real `openai` client gets is what the decode engine says alone.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.openai_asks import GREEDY_IDS, Asks
from tests.support.routers import RouterProcess
from tests.support.stock_engines import StockEngine, ask, eventually, metric, routing, serving
from tests.support.vllm.checks import prompt
from tests.support.vllm.servers import NAME
from tests.support.vllm.stock import WHEELS, stock_vllm

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not all(path.exists() for path in WHEELS), reason="NIXL's wheels are not there: make test-vllm"),
]

TEXT = "What is the capital of France?"
CLOSE = 1e-3
"""Between logarithms of probabilities whose batches were cut differently."""
LIKELIEST: Any = {"temperature": 1, "extra_body": {"top_k": 1, "return_token_ids": True, "ignore_eos": True}}
"""The greedy tokens, where vLLM refuses several answers that are greedy by their temperature."""
LOADS = "vllm:nixl_xfer_time_seconds_count"
FINISHED = "vllm:request_success_total"


@dataclasses.dataclass
class Pair:
    prefill: StockEngine
    decode: StockEngine
    router: RouterProcess

    def counts(self) -> tuple[float, float]:
        """Prompts that P answered, and that D read from P."""
        return self.prefill.metric(FINISHED), self.decode.metric(LOADS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_model: pathlib.Path) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    prefill = stock_vllm("p", directory, tiny_model, "kv_producer")
    decode = stock_vllm("d", directory, tiny_model, "kv_consumer")
    with (
        serving(prefill, decode),
        routing(f"--prefill={prefill.url}", f"--decode={decode.url}", "--dialect=vllm") as router,
    ):
        yield Pair(prefill, decode, router)


@pytest.fixture(scope="module")
def alone(pair: Pair) -> Iterator[Asks]:
    with Asks(pair.decode.url, NAME, GREEDY_IDS) as asks:
        yield asks


@pytest.fixture(scope="module")
def through(pair: Pair) -> Iterator[Asks]:
    with Asks(pair.router.url, NAME, GREEDY_IDS) as asks:
        yield asks


@pytest.mark.parametrize("length", [2, 129, 1500])
def test_the_tokens_are_those_of_the_decode_engine_alone(alone: Asks, through: Asks, pair: Pair, length: int) -> None:
    ids = prompt(length, seed="pair")
    wanted = alone.complete(ids)
    assert len(wanted.tokens) == 16
    answered, loaded = pair.counts()
    for stream in (False, True):
        found = through.complete(ids, stream=stream)
        assert found.tokens == wanted.tokens
        assert found.headers["x-kvxfer-prefill"] == "remote"
    eventually(lambda: pair.counts() == (answered + 2, loaded + 2), "both engines counted both legs")


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_that_of_the_decode_engine_alone(alone: Asks, through: Asks, stream: bool) -> None:
    wanted = alone.chat(TEXT, stream=stream)
    found = through.chat(TEXT, stream=stream)
    assert found.answer == wanted.answer
    assert found.headers["x-kvxfer-prefill"] == "remote"
    assert through.response(TEXT, stream=stream) == alone.response(TEXT, stream=stream) != ""


def test_the_usage_of_a_stream_counts_as_that_of_the_engine(alone: Asks, through: Asks) -> None:
    usages = [
        asks.chat(TEXT, stream=True, stream_options={"include_usage": True}).chunks[-1].usage
        for asks in (alone, through)
    ]
    assert (usages[0].prompt_tokens, usages[0].completion_tokens) == (
        usages[1].prompt_tokens,
        usages[1].completion_tokens,
    )


def test_log_probabilities_are_those_of_the_decode_engine_alone(alone: Asks, through: Asks) -> None:
    wanted, found = (asks.complete(prompt(200, seed="log"), logprobs=2) for asks in (alone, through))
    assert found.headers["x-kvxfer-prefill"] == "remote"
    assert found.tokens == wanted.tokens
    of_each = [said.chunks[0].choices[0].logprobs.token_logprobs for said in (wanted, found)]
    assert len(of_each[0]) == 16
    assert of_each[1] == pytest.approx(of_each[0], abs=CLOSE)


def test_several_answers_are_the_decode_engines_own_and_a_header_says_so(alone: Asks, through: Asks) -> None:
    wanted, found = (asks.chat(TEXT, n=2, **LIKELIEST) for asks in (alone, through))
    assert [choice.message.content for choice in found.chunks[0].choices] == [wanted.text[: len(wanted.text) // 2]] * 2
    assert found.answer == wanted.answer
    assert found.headers["x-kvxfer-prefill"] == "local"
    assert found.headers["x-kvxfer-prefill-reason"] == "field:n"


def test_what_is_the_clients_fault_is_told_in_the_engines_words(pair: Pair, through: Asks) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        through.client.completions.create(model="another", prompt="a text")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as caught:
        through.complete("fox " * 3000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature must be non-negative"):
        through.client.completions.create(model=NAME, prompt="a text", temperature=-2)
    workers = httpx.get(f"{pair.router.url}/v1/workers", trust_env=False).json()["data"]
    assert [worker["health"]["failures_in_a_row"] for worker in workers] == [0, 0]


def test_a_client_that_leaves_frees_both_engines(pair: Pair, through: Asks) -> None:
    stream = through.client.completions.create(
        model=NAME,
        prompt=prompt(700, seed="leaves"),
        max_tokens=1000,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    for engine in (pair.prefill, pair.decode):
        for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
            eventually(lambda: engine.metric(name) == 0, f"{name} of {engine.name} is 0")  # noqa: B023


def test_the_messages_api_is_split_too(pair: Pair) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 8, "temperature": 0}
    wanted, found = (ask(url, "/v1/messages", **body) for url in (pair.decode.url, pair.router.url))
    assert (wanted.status_code, found.status_code) == (200, 200), found.text
    assert found.json()["content"] == wanted.json()["content"]
    assert found.headers["x-kvxfer-prefill"] == "remote"


def test_metrics_and_log_name_both_legs(pair: Pair, through: Asks) -> None:
    """Last of those that need the router."""
    placed = metric(pair.router.url, "kvxfer_router_placements_total", 'reason="remote"')
    answered, loaded = pair.counts()
    said = through.complete("the quick brown fox")
    eventually(lambda: pair.counts() == (answered + 1, loaded + 1), "both engines counted both legs")
    assert metric(pair.router.url, "kvxfer_router_placements_total", 'reason="remote"') == placed + 1
    assert metric(pair.router.url, "kvxfer_router_recomputes_total") == 0
    code, log = pair.router.stop()
    assert code == 0
    [line] = [line for line in log.splitlines() if said.headers["x-request-id"] in line]
    assert f" prefill=127.0.0.1-{pair.prefill.port} decode=127.0.0.1-{pair.decode.port} reason=remote" in line
