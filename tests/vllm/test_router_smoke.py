"""The shortest way from the real `openai` client through kvxfer's router to stock `vllm serve`: one engine, one chat,
whole and in pieces. For a check that has a minute; everything beside it is in the other files.
"""

from __future__ import annotations

import pathlib

import pytest

from tests.support.openai_asks import GREEDY_IDS, Asks
from tests.support.stock_engines import routing, serving
from tests.support.vllm.servers import NAME
from tests.support.vllm.stock import stock_vllm

pytestmark = pytest.mark.timeout(300)

TEXT = "What is the capital of France?"


def test_a_chat_through_the_router_is_that_of_the_engine(tmp_path: pathlib.Path, tiny_model: pathlib.Path) -> None:
    engine = stock_vllm("smoke", tmp_path, tiny_model)
    with (
        serving(engine),
        routing(f"--engine={engine.url}") as router,
        Asks(engine.url, NAME, GREEDY_IDS) as alone,
        Asks(router.url, NAME, GREEDY_IDS) as through,
    ):
        wanted = alone.chat(TEXT)
        assert len(wanted.tokens) == 16
        for stream in (False, True):
            found = through.chat(TEXT, stream=stream)
            assert found.tokens == wanted.tokens
            assert found.headers["x-kvxfer-prefill-reason"] == "engine_alone"
