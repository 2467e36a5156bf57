"""A stream of real `vllm serve` that says nothing for longer than the router's limit, because its parser of tool calls
holds the call back while the engine computes: it is neither cut nor evidence against the engine.
"""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.support.routers import RouterProcess
from tests.support.stock_engines import StockEngine, routing, serving
from tests.support.vllm.checks import prompt
from tests.support.vllm.servers import NAME
from tests.support.vllm.stock import stock_vllm

pytestmark = pytest.mark.timeout(600)

PLUGIN = pathlib.Path(__file__).parents[1] / "support" / "vllm" / "silent_tool_parser.py"
LIMIT_S = 4.0
TOKENS = 3900
"""That is several limits long for a tiny model too."""
TOOL = {"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, tiny_model: pathlib.Path) -> Iterator[StockEngine]:
    flags = (
        "--enable-auto-tool-choice",
        "--tool-call-parser=holds_back",
        f"--tool-parser-plugin={PLUGIN}",
        "--max-model-len=4096",
    )
    engine = stock_vllm("quiet", tmp_path_factory.mktemp("quiet"), tiny_model, flags=flags)
    with serving(engine):
        yield engine


@pytest.fixture(scope="module")
def router(engine: StockEngine) -> Iterator[RouterProcess]:
    with routing(f"--engine={engine.url}", f"--token-timeout-s={LIMIT_S}", "--failures-to-eject=1") as router:
        yield router


def stream(url: str) -> tuple[list[str], float]:
    """The events of one chat with a tool, and the longest silence before one of them."""
    body = {
        **{"model": NAME, "messages": [{"role": "user", "content": "write"}], "tools": [TOOL], "stream": True},
        **{"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0},
    }
    events, longest_s, last_s = [], 0.0, time.monotonic()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=120.0) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                now_s = time.monotonic()
                longest_s = max(longest_s, now_s - last_s)
                last_s = now_s
                events.append(line.removeprefix("data: "))
    return events, longest_s


def test_a_silent_tool_call_is_not_cut_and_ejects_no_engine(engine: StockEngine, router: RouterProcess) -> None:
    _, alone_s = stream(engine.url)
    print(f"silent for {alone_s:.1f} s")
    assert alone_s > 2 * LIMIT_S, "the engine is too fast for this limit"
    for _ in range(3):
        events, silent_s = stream(router.url)
        assert events[-1] == "[DONE]", events
        assert silent_s > LIMIT_S
        *_, last = (json.loads(event) for event in events[:-1] if json.loads(event).get("choices"))
        assert last["choices"][0]["finish_reason"] == "length"
        assert not any("error" in json.loads(event) for event in events[:-1])
    [worker] = httpx.get(f"{router.url}/workers", trust_env=False).json()["data"]
    assert worker["state"] == "in", worker
    body = {"model": NAME, "prompt": prompt(20), "max_tokens": 2}
    answer = httpx.post(f"{router.url}/v1/completions", json=body, trust_env=False, timeout=60.0)
    assert (answer.status_code, answer.headers["x-kvxfer-attempt"]) == (200, "1")
