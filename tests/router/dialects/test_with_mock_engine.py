"""Each dialect's legs at two mock engines over real HTTP: the prompt is computed once, and P's blocks come back."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvxfer.openai.sse import EventDecoder
from kvxfer.router.apis import api_of
from kvxfer.router.dialects import Dialect, Handover, Leg, Order, Pair, dialect
from kvxfer.types import TransferId
from tests.support.mock_engine.mocks import Answer, Engine, mocks
from tests.support.router_bodies import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, BareWorker, inbound

TEXT = "The KV cache of this prompt is computed once. " * 20
FIELDS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": TEXT, "max_tokens": 8},
    CHAT: {"messages": [{"role": "user", "content": TEXT}], "max_completion_tokens": 8},
    RESPONSES: {"input": TEXT, "max_output_tokens": 8},
    MESSAGES: {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 8},
    GENERATE: {"text": TEXT, "sampling_params": {"max_new_tokens": 8}},
}
SPOKEN = [
    *(("kvxfer", "kvxfer", path) for path in (COMPLETIONS, CHAT)),
    *((name, "vllm", path) for name in ("vllm", "vllm-mooncake") for path in (COMPLETIONS, CHAT, RESPONSES, MESSAGES)),
    *(("vllm-kvxfer", "vllm", path) for path in (COMPLETIONS, CHAT)),
    *(("sglang", "sglang", path) for path in FIELDS),
]


class Engines:
    """A prefill and a decode engine of one kind."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill, self.decode = prefill, decode

    def pair(self, spoken: Dialect) -> Pair:
        p = BareWorker("p", self.prefill.url, bootstrap_port=self.prefill.port)
        pair = Pair(p, BareWorker("d", self.decode.url), TransferId(secrets.token_bytes(16)), room=secrets.randbits(62))
        url = spoken.discovery_url(p)
        if url is None:
            return pair
        answer = self.prefill.request("GET", url.removeprefix(self.prefill.url))
        return dataclasses.replace(pair, prefill_engine_id=spoken.engine_id(p, answer.body))


@pytest.fixture(scope="module")
def engines_of() -> Iterator[Callable[[str], Engines]]:
    """The engines of a kind, which are started once."""
    flags = ("--count", "2", "--roles", "prefill,decode", "--itl-ms", "0", "--kv-lease-s", "5", "--kv-wait-s", "2")
    started: dict[str, Engines] = {}
    with contextlib.ExitStack() as stack:

        def of(kind: str) -> Engines:
            if kind not in started:
                both = stack.enter_context(mocks(*flags, "--kind", kind, "--model", "m"))
                started[kind] = Engines(*both.engines)
            return started[kind]

        yield of


def send(engine: Engine, leg: Leg) -> Answer:
    named = {name.decode().replace("-", "_"): value.decode() for name, value in leg.headers}
    return engine.post(leg.path, leg.content(), **named)


def together(*calls: Callable[[], Answer]) -> list[Answer]:
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("name", "kind", "path"), SPOKEN)
def test_a_pair_computes_the_prompt_once(
    engines_of: Callable[[str], Engines], name: str, kind: str, path: str, is_stream: bool
) -> None:
    engines = engines_of(kind)
    spoken, prefill, decode = dialect(name), engines.prefill, engines.decode
    marked = {"cache_salt": secrets.token_hex(4)}  # so that no cache has the prompt
    read, pair = inbound(path, **FIELDS[path], **marked, stream=is_stream), engines.pair(spoken)
    before_p, before_d = prefill.statistics(), decode.statistics()
    handover: Handover | None = None
    if spoken.order is Order.PREFILL_FIRST:
        p = send(prefill, spoken.prefill_leg(read, pair))
        handover = spoken.handover(p.body)
        d = send(decode, spoken.decode_leg(read, pair, handover))
    else:
        legs = spoken.prefill_leg(read, pair), spoken.decode_leg(read, pair, None)
        p, d = together(lambda: send(prefill, legs[0]), lambda: send(decode, legs[1]))
    assert (p.status, d.status) == (200, 200), (p.body, d.body)
    after_p = prefill.wait(lambda now: now["holds"] == now["blocks_used"] == 0)
    after_d = decode.wait(lambda now: now["blocks_used"] == 0)
    counted = [
        now["prompt_tokens_computed"] - then["prompt_tokens_computed"]
        for now, then in ((after_p, before_p), (after_d, before_d))
    ]
    assert counted[0] > 100
    assert counted[1] == 1
    assert after_d["silent_recomputes"] == before_d["silent_recomputes"]
    assert after_p["blocks_expired"] == before_p["blocks_expired"]
    assert (d.headers["content-type"].startswith("text/event-stream")) == is_stream
    if is_stream:
        check_stream(path, d.body)


def check_stream(path: str, body: bytes) -> None:
    """Frames first, then content, then the end; no event is an error."""
    api = api_of(path)
    assert api is not None
    events = EventDecoder().feed(body)
    assert b"".join(event.raw for event in events) == body
    has_content = [api.style.has_content(event.data) for event in events]
    assert any(has_content)
    assert has_content.index(True) <= 4
    assert not any(api.style.failure("decode", event) for event in events)
    assert next(event for event in events if api.style.is_end(event)) is events[-1]


def test_a_client_that_left_costs_a_stock_vllm_no_blocks(engines_of: Callable[[str], Engines]) -> None:
    engines = engines_of("vllm")
    spoken, prefill, decode = dialect("vllm"), engines.prefill, engines.decode
    read, pair = inbound(CHAT, **FIELDS[CHAT], stream=True), engines.pair(spoken)
    handover = spoken.handover(send(prefill, spoken.prefill_leg(read, pair)).body)
    assert prefill.statistics()["holds"] == 1
    leg = spoken.forgo_leg(read, pair, handover)
    assert leg is not None
    assert send(decode, leg).status == 200
    now = prefill.wait(lambda now: now["holds"] == now["blocks_used"] == 0)
    assert now["blocks_expired"] == 0


def test_a_second_decode_engine_takes_a_kept_prefill(engines_of: Callable[[str], Engines]) -> None:
    """D fails before it fetched; the same handover serves the next D, and P computes nothing again."""
    engines = engines_of("vllm")
    spoken, prefill, decode = dialect("vllm"), engines.prefill, engines.decode
    read, pair = inbound(COMPLETIONS, **FIELDS[COMPLETIONS], cache_salt=secrets.token_hex(4)), engines.pair(spoken)
    handover = spoken.handover(send(prefill, spoken.prefill_leg(read, pair)).body)
    before = prefill.statistics()["prompt_tokens_computed"]
    decode.fault("status", status=500, count=1, path=COMPLETIONS)
    assert send(decode, spoken.decode_leg(read, pair, handover)).status == 500
    assert send(decode, spoken.decode_leg(read, pair, handover)).status == 200
    assert prefill.statistics()["prompt_tokens_computed"] == before
    assert json.loads(handover.params)["remote_port"] == prefill.port


@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
def test_a_list_of_prompts_is_prefilled_for_sglang(engines_of: Callable[[str], Engines], path: str) -> None:
    engines = engines_of("sglang")
    spoken, prefill, decode = dialect("sglang"), engines.prefill, engines.decode
    texts = [f"{TEXT} {secrets.token_hex(4)}" for _ in range(3)]
    fields = {"prompt": texts, "max_tokens": 4} if path == COMPLETIONS else {"text": texts}
    read, pair = inbound(path, **fields), engines.pair(spoken)
    legs = spoken.prefill_leg(read, pair), spoken.decode_leg(read, pair, None)
    p, d = together(lambda: send(prefill, legs[0]), lambda: send(decode, legs[1]))
    assert (p.status, d.status) == (200, 200), (p.body, d.body)
    assert len(d.json()["choices"] if path == COMPLETIONS else d.json()) == 3
    prefill.wait(lambda now: now["holds"] == now["blocks_used"] == 0)
