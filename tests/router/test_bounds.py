"""Bounds as wide as the engines', and the same for an answer however it is sent."""

from __future__ import annotations

import base64
import json
import random

import pytest

from kvxfer.agent.metrics import SECONDS_BUCKETS
from kvxfer.config import AgentConfig
from kvxfer.engine import metrics as engine_metrics
from kvxfer.engine.options import WorkerOptions
from kvxfer.load.drive.answer import LINE_BYTES_MAX, PLAIN_BYTES_MAX
from kvxfer.mock_engine import statistics as mock_statistics
from kvxfer.mock_engine.options import MockEngineOptions
from kvxfer.openai.sse import EVENT_BYTES_MAX, EventDecoder
from kvxfer.openai.transfer_params import LEG_BYTES_MAX
from kvxfer.router.metrics import BODY_BUCKETS, DURATION_BUCKETS_S, TTFT_BUCKETS_S
from kvxfer.router.options import RouterOptions
from tests.support.fake_workers import MODEL, FakeWorker, broken, events, router_over, texts

MIB = 1 << 20


async def test_an_event_may_be_as_long_as_a_whole_answer() -> None:
    d = FakeWorker("d0")
    d.tokens = ["one", "x" * (2 * MIB), " three"]
    async with router_over(d) as router:
        assert texts(events((await router.complete(stream=True)).text)) == "".join(d.tokens)
        assert (await router.complete()).json()["choices"][0]["text"] == "".join(d.tokens)


async def test_a_longer_one_is_refused_by_the_same_bound() -> None:
    d = FakeWorker("d0")
    d.tokens = ["one", "x" * (3 * MIB), " three"]
    async with router_over(d, max_answer_bytes=MIB) as router:
        whole = await router.complete()
        assert whole.status_code == 502
        streamed = broken(events((await router.complete(stream=True)).text))
        for error in (whole.json()["error"], streamed):
            assert f"longer than {MIB} bytes" in error["message"]
        assert router.workers.entries()[0].health.is_plain


async def test_a_body_with_three_photographs_reaches_the_worker() -> None:
    d = FakeWorker("d0")
    photograph = base64.b64encode(random.Random(1).randbytes(6 * MIB)).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{photograph}"}}] * 3
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": parts}]}).encode()
    assert 16 * MIB < len(body) < RouterOptions().max_body_bytes
    async with router_over(d) as router:
        answer = await router.client.post("/v1/chat/completions", content=body)
        assert answer.status_code == 200, answer.text[:300]
    assert d.received[0].body["messages"][0]["content"][2] == parts[2]


def test_bounds_fit_into_one_another() -> None:
    router = RouterOptions()
    assert router.max_body_bytes >= 64 * MIB
    assert router.body_budget_bytes >= 4 * router.max_body_bytes
    for worker in (WorkerOptions().max_body_bytes, MockEngineOptions().max_body_bytes):
        assert router.max_body_bytes + LEG_BYTES_MAX <= worker
    assert router.max_answer_bytes == EVENT_BYTES_MAX == PLAIN_BYTES_MAX == LINE_BYTES_MAX


@pytest.mark.parametrize(
    ("buckets", "longest"),
    [
        (TTFT_BUCKETS_S, RouterOptions().request_timeout_s),
        (DURATION_BUCKETS_S, 3600.0),
        (engine_metrics.TTFT_BUCKETS_S, RouterOptions().request_timeout_s),
        (SECONDS_BUCKETS, AgentConfig().grant_wait_s),
        (mock_statistics.BUCKETS_S, RouterOptions().request_timeout_s),
        (BODY_BUCKETS, RouterOptions().max_body_bytes),
    ],
)
def test_a_histogram_ends_where_the_longest_wait_does(buckets: tuple[float, ...], longest: float) -> None:
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] >= longest


def test_a_long_event_costs_no_more_for_being_cut_small() -> None:
    """Each byte is looked for a line's end once."""
    decoder = EventDecoder()
    event = b"data: " + b"x" * (4 * MIB) + b"\n\n"
    found = [one for at in range(0, len(event), 4096) for one in decoder.feed(event[at : at + 4096])]
    assert [one.raw for one in found] == [event]
