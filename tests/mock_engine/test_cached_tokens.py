"""What an engine tells of its prefix cache: in each API's usage, on each leg, on the metrics page, and in a lie."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.openai.transfer_params import Part
from tests.support.mock_engine.legs import LEG_P, kvxfer_params, sglang_body, together
from tests.support.mock_engine.mocks import Answer, Engine, Mocks, mocks

STEPS = ("--pace", "steps", "--step-ms", "0.1", "--prefill-token-us", "0")
IDS = list(range(1000, 1040))
"""Forty tokens: two full blocks of sixteen."""
TEXT = "abc" * 40
APIS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": ({"prompt": TEXT, "max_tokens": 2}, "prompt_tokens"),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}, "prompt_tokens"),
    "/v1/responses": ({"input": TEXT, "max_output_tokens": 2}, "input_tokens"),
    "/v1/messages": ({"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}, "input_tokens"),
    "/generate": ({"text": TEXT, "sampling_params": {"max_new_tokens": 2}}, "prompt_tokens"),
}


@pytest.fixture(scope="module")
def stepping() -> Iterator[Engine]:
    with mocks(*STEPS) as started:
        yield started.engines[0]


@pytest.fixture(scope="module")
def stepping_pair() -> Iterator[Mocks]:
    pair = ("--count", "2", "--roles", "prefill,decode", "--kv-wait-s", "5")
    with mocks("--pace", "steps", "--step-ms", "2", *pair) as started:
        yield started


@pytest.fixture(autouse=True)
def honest_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("stepping", "stepping_pair"):
        if name in request.fixturenames:
            started = request.getfixturevalue(name)
            for engine in [started] if isinstance(started, Engine) else started.engines:
                engine.request("DELETE", "/mock/faults")
                engine.post("/reset_prefix_cache", {})


def usage_of(answer: Answer) -> dict[str, Any]:
    """The object that has the counts, of a whole answer or of the last event of a stream that has one."""
    assert answer.status == 200, answer.body
    found: dict[str, Any] = {}
    for event in answer.events or [answer.json()]:
        if event != "[DONE]":
            event = event.get("response") or event
            found = event.get("usage") or event.get("meta_info") or found
    return found


def cached_of(usage: dict[str, Any]) -> int | None:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    said: int | None = details.get("cached_tokens", details.get("cache_read_input_tokens"))
    return said


def asked(engine: Engine, path: str, streamed: bool) -> dict[str, Any]:
    body = {**APIS[path][0], "stream": streamed}
    if streamed and path in ("/v1/completions", "/v1/chat/completions"):
        body["stream_options"] = {"include_usage": True}
    return usage_of(engine.post(path, body))


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", APIS)
def test_every_api_tells_the_tokens_that_were_cached(stepping: Engine, path: str, streamed: bool) -> None:
    first, second = asked(stepping, path, streamed), asked(stepping, path, streamed)
    prompt = first[APIS[path][1]]
    cached = (prompt - 1) // 16 * 16
    assert cached >= 32
    assert (cached_of(first), cached_of(second)) == (0, cached)
    whole = prompt - cached if path == "/v1/messages" else prompt  # Anthropic's are those that were not cached
    assert second[APIS[path][1]] == whole


@pytest.mark.parametrize("tokens", [15, 16, 17, 31, 32, 33])
def test_the_last_token_is_never_cached(stepping: Engine, tokens: int) -> None:
    for _ in range(2):
        usage = stepping.complete(IDS[:tokens], 1).json()["usage"]
    assert cached_of(usage) == (tokens - 1) // 16 * 16 < tokens


def test_each_prompt_of_a_batch_has_its_own_count(stepping: Engine) -> None:
    stepping.complete(IDS, 1)
    body = {"input_ids": [IDS, [7] * 20], "sampling_params": {"max_new_tokens": 1}}
    assert [one["meta_info"]["cached_tokens"] for one in stepping.post("/generate", body).json()] == [32, 0]
    usage = stepping.complete([IDS, [8] * 20], 1).json()["usage"]
    assert (usage["prompt_tokens"], cached_of(usage)) == (60, 32)


@pytest.mark.parametrize("flags", [("--no-prefix-caching",), ("--pace", "fixed", "--itl-ms", "0")], ids=str)
def test_an_engine_without_a_cache_tells_nothing_cached(flags: tuple[str, ...]) -> None:
    with mocks(*STEPS, *flags) as started:
        [engine] = started.engines
        assert [cached_of(engine.complete(IDS, 1).json()["usage"]) for _ in range(2)] == [0, 0]
        assert metrics(engine, "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total") == [0, 0]


def test_details_can_be_left_out() -> None:
    """As vLLM and SGLang leave them out by default: null in a whole answer, no member in a stream."""
    with mocks(*STEPS, "--no-prompt-tokens-details") as started:
        [engine] = started.engines
        for path in ("/v1/completions", "/v1/chat/completions"):
            for _ in range(2):
                assert asked(engine, path, False)["prompt_tokens_details"] is None
                assert "prompt_tokens_details" not in asked(engine, path, True)
        for streamed in (False, True):
            assert asked(engine, "/v1/messages", streamed).keys() == {"input_tokens", "output_tokens"}
        for path in ("/v1/responses", "/generate"):
            assert [cached_of(asked(engine, path, False)) for _ in range(2)][1], "told in any case"


def test_sglang_leaves_the_details_out_where_nothing_was_cached() -> None:
    with mocks(*STEPS, "--kind", "sglang") as started:
        [engine] = started.engines
        told = [engine.complete(IDS, 1).json()["usage"]["prompt_tokens_details"] for _ in range(2)]
        assert told == [None, {"cached_tokens": 32}]


def test_vllm_prefill_tells_its_cache_and_decode_all_but_one(stepping_pair: Mocks) -> None:
    prefill, decode = stepping_pair.engines
    for cached in (0, 32):
        p = prefill.post("/v1/completions", {"prompt": IDS, **LEG_P}).json()
        params = p["kv_transfer_params"]
        assert (cached_of(p["usage"]), params["remote_prefill_cached_tokens"]) == (cached, cached)
        d = decode.post("/v1/completions", {"prompt": IDS, "max_tokens": 2, "kv_transfer_params": params})
        assert cached_of(usage_of(d)) == 39, "whether or not D's own cache has them"


def kvxfer_legs(pair: list[Engine], number: int, *, vllm: bool = False) -> list[Answer]:
    """What prefill and decode answer."""

    def leg(engine: Engine, part: Part) -> Answer:
        params = kvxfer_params(part, number, *pair, vllm=vllm)
        return engine.post("/v1/completions", {"prompt": IDS, "max_tokens": 2, "kv_transfer_params": params})

    return together(lambda: leg(pair[0], Part.PREFILL), lambda: leg(pair[1], Part.DECODE))


def test_vllm_with_kvxfers_connector_tells_all_but_one() -> None:
    with mocks(*STEPS, "--count", "2", "--roles", "prefill,decode", "--kind", "vllm") as started:
        for number, cached in ((1, 0), (2, 32)):
            p, d = kvxfer_legs(started.engines, number, vllm=True)
            assert (cached_of(usage_of(p)), cached_of(usage_of(d))) == (cached, 39)


def test_kvxfers_prefill_tells_its_cache(stepping_pair: Mocks) -> None:
    for number, cached in ((11, 0), (12, 32)):
        p, d = kvxfer_legs(stepping_pair.engines, number)
        assert p.json()["usage"] == {"prompt_tokens": 40, "cached_tokens": cached}
        assert cached_of(usage_of(d)) == cached, "of D's own cache"


def test_sglangs_prefill_tells_its_cache(stepping_pair: Mocks) -> None:
    prefill, decode = stepping_pair.engines
    told = []
    for room in (21, 22):
        body = sglang_body(prefill, room, input_ids=IDS, sampling_params={"max_new_tokens": 2})
        p, d = together(
            functools.partial(prefill.post, "/generate", body), functools.partial(decode.post, "/generate", body)
        )
        assert (p.status, d.status) == (200, 200)
        told.append(p.json()["meta_info"]["cached_tokens"])
    assert told == [0, 32]


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("lie", "told"), [({"cached_tokens": 10_000}, 10_000), ({"cached_factor": 0.5}, 16), ({"time_factor": 3}, 32)]
)
def test_a_lie_is_told_once_and_changes_nothing_else(
    stepping: Engine, path: str, lie: dict[str, Any], told: int
) -> None:
    asked(stepping, path, False)
    cached = cached_of(asked(stepping, path, False))
    assert cached
    before = stepping.statistics()
    stepping.fault("lie", count=2, **lie)
    for streamed in (False, True):
        assert cached_of(asked(stepping, path, streamed)) == (told if told > 32 else cached * told // 32)
    assert cached_of(asked(stepping, path, False)) == cached
    now = stepping.statistics()
    assert now["prompt_tokens_cached"] - before["prompt_tokens_cached"] == 3 * cached


def test_a_lie_of_a_prefill_engine_reaches_its_router(stepping_pair: Mocks) -> None:
    prefill, decode = stepping_pair.engines
    prefill.fault("lie", cached_tokens=777, time_factor=1e6, leg="prefill")
    params = prefill.post("/v1/completions", {"prompt": IDS, **LEG_P}).json()["kv_transfer_params"]
    assert params["remote_prefill_cached_tokens"] == 777
    assert decode.post("/v1/completions", {"prompt": IDS, "kv_transfer_params": params}).status == 200
    p, d = kvxfer_legs(stepping_pair.engines, 31)
    answer = p.json()
    assert answer["usage"] == {"prompt_tokens": 40, "cached_tokens": 777}
    assert answer["timings"]["prefill_s"] >= 1000  # a step takes 2 ms
    assert d.json()["kvxfer"]["total_s"] < 100


def test_a_lie_of_a_decode_engine_is_in_its_report(stepping_pair: Mocks) -> None:
    stepping_pair.engines[1].fault("lie", time_factor=0)
    _, d = kvxfer_legs(stepping_pair.engines, 32)
    report = d.json()["kvxfer"]
    assert (report["ttft_s"], report["queue_s"], report["total_s"]) == (0, 0, 0)
    assert set(report["seconds"].values()) == {0}


def metrics(engine: Engine, *names: str) -> list[float]:
    page = engine.request("GET", "/metrics").body.decode()
    return [float(re.findall(rf"^{name}{{[^}}]*}} (\S+)$", page, re.MULTILINE)[0]) for name in names]


def test_metrics_page_counts_what_the_cache_was_asked_for(stepping: Engine) -> None:
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total")
    before = metrics(stepping, *names)
    for tokens in (40, 40, 20):
        stepping.complete(IDS[:tokens], 1)
    now = metrics(stepping, *names)
    assert [after - ago for after, ago in zip(now, before, strict=True)] == [100, 32 + 16, 100]


def test_a_full_engine_gives_up_prefixes_and_then_lets_requests_wait() -> None:
    """Eight blocks. A prefix has four of them, a long answer then needs five, and the next prompt waits for its end."""
    with mocks("--pace", "steps", "--step-ms", "20", "--blocks", "8") as started:
        [engine] = started.engines
        cached, long, other = IDS + IDS[:24], [1] * 65, [2] * 64
        engine.complete(cached, 1)
        assert metrics(engine, "vllm:kv_cache_usage_perc") == [0]

        def next_waits() -> Answer:
            engine.wait(lambda now: now["running"] == 1)
            return engine.complete(other, 1)

        def looked_at() -> Answer:
            engine.wait(lambda now: now["waiting"] == 1)
            usage, running, waiting = metrics(
                engine, "vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"
            )
            assert (usage, running, waiting) == (5 / 8, 1, 1)
            return engine.request("GET", "/health")

        answers = together(lambda: engine.complete(long, 16), next_waits, looked_at)
        assert [answer.status for answer in answers] == [200] * 3
        assert engine.statistics()["preemptions"] == 0
        assert cached_of(engine.complete(cached, 1).json()["usage"]) == 0
