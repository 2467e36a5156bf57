"""kvxfer's router in front of SGLang's server, unchanged (`make test-sglang-router`): one (`--engine URL`), and a
prefill and a decode server with kvxfer's transfer backend (`--prefill URL --decode URL --dialect sglang`). What the
real `openai` client gets is what one server says.

It runs in kvxfer's own environment; the servers have SGLang's.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from kvxfer.connectors.sglang.options import Options
from tests.support.openai_asks import Asks
from tests.support.routers import RouterProcess
from tests.support.sglang.stock import NAME, PYTHON, StockSglang
from tests.support.stock_engines import ask, eventually, metric, routing, serving
from tests.support.vllm.checks import prompt

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="build/sglang-venv is not there: make test-sglang-router"),
]

TEXT = "What is the capital of France?"
CLOSE = 1e-3
"""Between logarithms of probabilities whose batches were cut differently."""


def generate(asks: Asks, length: int, **more: Any) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    answer = ask(asks.url, "/generate", input_ids=ids(length), sampling_params=sampling, **more)
    assert answer.status_code == 200, answer.text
    return answer


def streamed(answer: httpx.Response) -> Any:
    """The tokens at its end: how many come in one event is chance."""
    *_, last, end = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert end == "[DONE]"
    return json.loads(last)["output_ids"]


def ids(length: int) -> list[int]:
    return [token % 500 for token in prompt(length, seed="sglang")]


def several(asks: Asks) -> list[str]:
    made = asks.client.completions.create(model=NAME, prompt=["a", "some", "three"], max_tokens=6, temperature=0)
    return [choice.text for choice in made.choices]


ANSWERS: dict[str, Callable[[Asks], Any]] = {
    "chat": lambda asks: asks.chat(TEXT).text,
    "chat, stream": lambda asks: asks.chat(TEXT, stream=True).text,
    "completion": lambda asks: asks.complete(TEXT).text,
    "completion, stream": lambda asks: asks.complete(TEXT, stream=True).text,
    "1 token": lambda asks: asks.complete(ids(1)).text,
    "700 tokens": lambda asks: asks.complete(ids(700)).text,
    "several prompts": several,
    "generate": lambda asks: generate(asks, 300).json()["output_ids"],
    "generate, stream": lambda asks: streamed(generate(asks, 300, stream=True)),
}
"""What is asked of one server, and through the router, and what is compared of what it says."""


@dataclasses.dataclass
class One:
    """What one server said before it ended: alone, and behind the router."""

    alone: dict[str, Any]
    behind: dict[str, Any]
    reason: str
    logprobs: list[float]
    refused: openai.APIStatusError


def log_probabilities(asks: Asks) -> list[float]:
    said = asks.chat(TEXT, logprobs=True, top_logprobs=2).chunks[0].choices[0].logprobs
    return [token.logprob for token in said.content]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    from kvxfer.engine.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", layers=3, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, model: pathlib.Path) -> One:
    """It has ended when this is given: a machine that has few processors runs two servers at once, not three."""
    server = StockSglang("one", tmp_path_factory.mktemp("one"), model)
    with (
        serving(server),
        routing(f"--engine={server.url}") as router,
        Asks(server.url, NAME) as alone,
        Asks(router.url, NAME) as behind,
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            behind.client.embeddings.create(model=NAME, input="a text")
        return One(
            {name: answer(alone) for name, answer in ANSWERS.items()},
            {name: answer(behind) for name, answer in ANSWERS.items()},
            behind.chat(TEXT).headers["x-kvxfer-prefill-reason"],
            log_probabilities(alone),
            caught.value,
        )


@dataclasses.dataclass
class Pair:
    prefill: StockSglang
    decode: StockSglang
    router: RouterProcess
    asks: Asks


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model: pathlib.Path, one: One) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    prefill, decode = (StockSglang(role, directory, model, role) for role in ("prefill", "decode"))
    with (
        serving(prefill, decode),
        routing(f"--prefill={prefill.as_prefill}", f"--decode={decode.url}", "--dialect=sglang") as router,
        Asks(router.url, NAME) as asks,
    ):
        yield Pair(prefill, decode, router, asks)


@pytest.mark.parametrize("name", ANSWERS)
def test_one_server_says_the_same_behind_the_router(one: One, name: str) -> None:
    assert one.behind[name] == one.alone[name]
    assert one.alone[name]


def test_what_one_server_refuses_is_its_own_answer(one: One) -> None:
    assert one.reason == "engine_alone"
    assert 400 <= one.refused.status_code < 500
    assert one.refused.type != "server_error"


@pytest.mark.parametrize("name", ANSWERS)
def test_a_pair_says_what_one_server_says(one: One, pair: Pair, name: str) -> None:
    placed = metric(pair.router.url, "kvxfer_router_placements_total", 'reason="remote"')
    assert ANSWERS[name](pair.asks) == one.alone[name]
    assert metric(pair.router.url, "kvxfer_router_placements_total", 'reason="remote"') == placed + 1


def test_log_probabilities_are_those_of_one_server(one: One, pair: Pair) -> None:
    assert len(one.logprobs) == 16
    assert log_probabilities(pair.asks) == pytest.approx(one.logprobs, abs=CLOSE)


def test_what_is_the_clients_fault_is_told_and_counts_for_nothing(pair: Pair) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        pair.asks.client.completions.create(model="another", prompt="a text")
    with pytest.raises(openai.BadRequestError) as caught:
        pair.asks.complete("fox " * 3000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="n: a prefill worker and a decode worker cannot share"):
        pair.asks.complete("a text", n=2)
    assert len(pair.asks.complete("a text").text) > 0
    workers = httpx.get(f"{pair.router.url}/v1/workers", trust_env=False).json()["data"]
    assert [worker["health"]["failures_in_a_row"] for worker in workers] == [0, 0]


def test_a_pause_of_the_prefill_server_fails_no_request(one: One, pair: Pair) -> None:
    """Some of the requests have come by then, some come in the pause, which is longer than a silent engine counts as
    alive."""
    names = ["700 tokens", "generate", "completion", "chat, stream"]
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        sent = [pool.submit(ANSWERS[name], pair.asks) for name in names[:2]]
        assert ask(pair.prefill.url, "/pause_generation", mode="in_place").status_code == 200
        try:
            sent += [pool.submit(ANSWERS[name], pair.asks) for name in names[2:]]
            time.sleep(Options.engine_silent_s + 3.0)
            assert not sent[-1].done()
        finally:
            assert ask(pair.prefill.url, "/continue_generation").status_code == 200
        assert [answer.result() for answer in sent] == [one.alone[name] for name in names]


def test_a_client_that_leaves_frees_both_servers(pair: Pair) -> None:
    stream = pair.asks.client.completions.create(
        model=NAME, prompt=ids(700), max_tokens=1000, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    for server in (pair.prefill, pair.decode):
        eventually(lambda: server.used_tokens() == 0, f"{server.name} has every page back")  # noqa: B023
