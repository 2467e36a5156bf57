"""kvxfer's router in front of stock `vllm serve`, unchanged and without a connector (`--engine URL`): what the real
`openai` client gets through it is what one engine says. At last both engines are restarted in turn.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import openai
import pytest

from tests.support.openai_asks import GREEDY_IDS, Asks
from tests.support.router_load import OpenLoop
from tests.support.routers import RouterProcess
from tests.support.stock_engines import StockEngine, ask, drain, eventually, routing, serving
from tests.support.vllm.checks import prompt
from tests.support.vllm.servers import NAME
from tests.support.vllm.stock import stock_vllm

pytestmark = pytest.mark.timeout(900)

TEXT = "What is the capital of France?"
OPEN_LOOP_PER_S = 2.0
FINISHED = "vllm:request_success_total"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, tiny_model: pathlib.Path) -> Iterator[list[StockEngine]]:
    directory = tmp_path_factory.mktemp("engines")
    started = [stock_vllm(name, directory, tiny_model) for name in ("one", "other")]
    with serving(*started):
        yield started


@pytest.fixture(scope="module")
def router(engines: list[StockEngine]) -> Iterator[RouterProcess]:
    with routing(*(f"--engine={engine.url}" for engine in engines)) as router:
        yield router


@pytest.fixture(scope="module")
def alone(engines: list[StockEngine]) -> Iterator[Asks]:
    with Asks(engines[0].url, NAME, GREEDY_IDS) as asks:
        yield asks


@pytest.fixture(scope="module")
def through(router: RouterProcess) -> Iterator[Asks]:
    with Asks(router.url, NAME, GREEDY_IDS) as asks:
        yield asks


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_that_of_one_engine(alone: Asks, through: Asks, stream: bool) -> None:
    wanted = alone.chat(TEXT, stream=stream)
    found = through.chat(TEXT, stream=stream)
    assert found.answer == wanted.answer
    assert len(wanted.tokens) == 16
    assert found.headers["x-kvxfer-prefill-reason"] == "engine_alone"
    ids = prompt(300, seed="engines")
    assert through.complete(ids, stream=stream).answer == alone.complete(ids, stream=stream).answer
    assert through.response(TEXT, stream=stream) == alone.response(TEXT, stream=stream) != ""


@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        ("/tokenize", {"prompt": "the quick brown fox"}, "tokens"),
        ("/detokenize", {"tokens": [5, 6, 7]}, "prompt"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 8, "temperature": 0},
            "content",
        ),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 4, "top_k": 1}, "choices"),
    ],
)
def test_a_route_answers_as_one_engine_does(
    engines: list[StockEngine], router: RouterProcess, path: str, body: dict[str, object], key: str
) -> None:
    wanted, found = (ask(url, path, model=NAME, **body) for url in (engines[0].url, router.url))
    assert (wanted.status_code, found.status_code) == (200, 200), found.text
    assert found.json()[key] == wanted.json()[key]


def test_what_vllm_does_not_serve_is_its_own_answer(through: Asks) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        through.client.embeddings.create(model=NAME, input="a text")
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        through.client.completions.create(model="another", prompt="a text")
    assert [model.id for model in through.client.models.list()] == [NAME]
    assert through.client.models.retrieve(NAME).id == NAME


def test_a_rolling_restart_of_both_loses_no_request(engines: list[StockEngine], router: RouterProcess) -> None:
    body = {"model": NAME, "prompt": prompt(200, seed="rolling"), "max_tokens": 24}
    loop = OpenLoop(router.url, engines[0].url, body, per_s=OPEN_LOOP_PER_S)
    with loop.running():
        for engine, other in (engines, reversed(engines)):
            drain(router, engine)
            eventually(lambda: engine.metric("vllm:num_requests_running") == 0, f"{engine.name} is idle")  # noqa: B023
            finished = other.metric(FINISHED)
            engine.end()
            engine.start()
            engine.wait_ready()
            assert engine.metric(FINISHED) == 0
            drain(router, engine, "--undo")
            eventually(lambda: engine.metric(FINISHED) > 2, f"{engine.name} has work again")  # noqa: B023
            assert other.metric(FINISHED) > finished
    assert loop.failures == []
    assert loop.done == loop.asked > 20
