"""What each leg of a request says of its worker, in every dialect: a verdict reaches health while its claim is held.

The attempt is the real one, over engines that answer within the process. Beside it stands `policy.health` alone, which
is told claim, verdict and end in that order: both must agree after each request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.errors import UsageError
from kvxfer.openai.transfer_params import Part
from kvxfer.policy.health import BLAMES, Blame, HealthEvent, HealthState, WorkerHealth
from kvxfer.router.answer import ClientAnswer
from kvxfer.router.apis import api_of
from kvxfer.router.core import RouterCore
from kvxfer.router.dialects import DIALECTS, Order, dialect
from kvxfer.router.dispatch import Dispatcher
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.inbound import Inbound
from kvxfer.router.metrics import RouterMetrics
from kvxfer.router.options import RouterOptions
from kvxfer.router.record import RequestRecord
from kvxfer.router.upstream import (
    UpstreamClosedError,
    UpstreamConnectError,
    UpstreamPhase,
    UpstreamResponse,
    UpstreamTimeoutError,
)
from kvxfer.types import Role
from tests.support.fleet import FakeClock, fleet, stock

HANDED = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r", "remote_block_ids": [1]}
WHOLE = {
    "object": "text_completion",
    "choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}],
    "kv_transfer_params": {**HANDED, "remote_host": "127.0.0.1", "remote_port": 1},
}
STREAM = b'data: {"choices":[{"index":0,"text":"hi","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
KINDS = {"error": "error", "refused": "unreachable", "hung": "hung", "lost": "lost", "unread": "unread"}
"""What an engine's answer counts as; the others say nothing of its health."""
OUTCOMES = ("ok", "client's fault", "busy", *KINDS)


class NoLink:
    def __init__(self, pieces: Sequence[bytes], response: UpstreamResponse | None = None) -> None:
        self.pieces = pieces

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def redirect(self, emit: Callable[[bytes], object]) -> None: ...
    def give_up(self) -> None: ...
    def leave(self, late: object) -> None: ...


def failing(outcome: str, address: str) -> Exception | None:
    if outcome == "refused":
        return UpstreamConnectError("refused", address=address, phase=UpstreamPhase.CONNECT)
    if outcome == "hung":
        return UpstreamTimeoutError("hung", address=address, phase=UpstreamPhase.FIRST_BYTE)
    if outcome == "unread":
        return UpstreamClosedError("closed", address=address, phase=UpstreamPhase.FIRST_BYTE)
    return None


def answer_of(outcome: str) -> tuple[int, dict[str, Any]]:
    if outcome == "ok" or outcome == "lost":
        return 200, WHOLE
    status, code = {"client's fault": (400, "bad"), "busy": (503, "overloaded"), "error": (500, "broken")}[outcome]
    return status, {"error": {"message": outcome, "type": "x", "code": code, "retryable": outcome == "busy"}}


class Engines:
    """Both engines of a pair, and what they answer next. ``ended`` are the legs whose answer was whole or failed."""

    def __init__(self, urls: dict[Part, str]) -> None:
        self.parts = {url: part for part, url in urls.items()}
        self.outcomes = dict.fromkeys(Part, "ok")
        self.waits_for_prefill = False
        self.ended: dict[Part, str] = {}
        self.begun = 0
        self.prefilled = asyncio.Event()

    def pool(self, address: str, limits: object = None) -> EnginePool:
        return EnginePool(self, address)


class EnginePool:
    def __init__(self, engines: Engines, address: str) -> None:
        self.engines, self.address = engines, address

    async def close(self) -> None: ...

    async def request(
        self, method: str, target: str, headers: object, body: object, deadlines: object, **more: object
    ) -> UpstreamResponse:
        if method == "GET":  # the bootstrap server of a prefill engine
            return self._response(200, [b'{"0":{"engine_id":"e"}}'])
        engines, part = self.engines, self.engines.parts[self.address]
        if part is Part.DECODE and engines.waits_for_prefill:
            await engines.prefilled.wait()
        for _ in range(3):  # its leg ends after others had their turn
            await asyncio.sleep(0)
        outcome = engines.outcomes[part]
        engines.ended[part] = outcome
        if part is Part.PREFILL:
            asyncio.get_running_loop().call_later(0.0, engines.prefilled.set)
        error = failing(outcome, self.address)
        if error is not None:
            raise error
        status, said = answer_of(outcome)
        is_stream = b'"stream":true' in b"".join(map(bytes, body)) and part is Part.DECODE and status == 200  # type: ignore[call-overload]
        pieces = [STREAM] if is_stream else [json.dumps(said).encode()]
        return self._response(status, [] if outcome == "lost" else pieces, is_lost=outcome == "lost", stream=is_stream)

    def _response(
        self, status: int, pieces: list[bytes], *, is_lost: bool = False, stream: bool = False
    ) -> UpstreamResponse:
        response = UpstreamResponse(NoLink(pieces), self.address)
        kind = b"text/event-stream" if stream else b"application/json"
        response.begin(status, [(b"content-type", kind)])
        for piece in pieces:
            response.receive()(piece)
        lost = UpstreamClosedError("lost", address=self.address, phase=UpstreamPhase.BODY)
        response.end(lost if is_lost else None)
        return response


class Exchange:
    """A client that takes everything."""

    def __init__(self) -> None:
        self.is_started = self.is_ended = self.is_gone = False
        self.status = 0
        self.on_gone = self.on_pause = self.on_resume = None

    def write(self, chunk: bytes) -> None: ...
    def chunk_writer(self) -> None: ...

    def start(self, status: int, headers: object) -> None:
        self.is_started, self.status = True, status

    def respond(self, status: int, headers: object, body: bytes) -> None:
        self.is_started = self.is_ended = True
        self.status = status

    def end(self) -> None:
        self.is_ended = True


@dataclasses.dataclass
class Model:
    """`policy.health` alone, told in the right order."""

    health: WorkerHealth

    def tell(self, outcome: str | None, request_id: str, now_s: float, *, is_counted: bool) -> bool:
        """Returns whether the failure counted in the row of its request."""
        self.health.begin(request_id, now_s)
        if outcome == "ok":
            self.health.succeeded(request_id, now_s, 0.0)
        elif outcome in KINDS:
            self.health.failed(KINDS[outcome], request_id, now_s, 0.0, is_counted=is_counted)
        self.health.end(request_id)
        return outcome in KINDS and BLAMES[KINDS[outcome]] is Blame.IN_A_ROW


class World:
    """One pair of ``name``, or one engine where it is plain, and the models beside it."""

    def __init__(self, name: str) -> None:
        self.dialect = dialect(name)
        self.is_alone = name == "plain"
        parts = (Part.DECODE,) if self.is_alone else tuple(Part)
        self.urls = {part: f"http://127.0.0.1:{10000 + at}" for at, part in enumerate(parts)}
        self.engines = Engines(self.urls)
        self.engines.waits_for_prefill = not self.is_alone and self.dialect.order is Order.TOGETHER
        self.clock: FakeClock
        self.workers: Workers
        self.workers, self.clock = fleet(make_pool=self.engines.pool)
        roles = {Part.PREFILL: Role.PREFILL, Part.DECODE: Role.BOTH if self.is_alone else Role.DECODE}
        self.workers.replace(
            "flags",
            [stock(part.value, roles[part], port=10000 + at, dialect=name) for at, part in enumerate(parts)],
        )
        options = RouterOptions(engine=("http://127.0.0.1:1",), attempts_max=1, local_prefill="off")
        self.core = RouterCore(options, self.workers, RouterMetrics(self.workers), now=self.clock)
        self.dispatcher = Dispatcher(self.core, draw=lambda: 0.0, tie_break=lambda: 0)
        self.entries = {Part(entry.worker.agent_id): entry for entry in self.workers.entries()}
        self.models = {part: Model(WorkerHealth(self.workers._options)) for part in parts}
        self.requests = 0

    def open(self, part: Part) -> None:
        """Put that worker out, and let a probe find it back."""
        entry, model = self.entries.get(part), self.models.get(part)
        if entry is None or model is None:
            return
        request_id = f"lost before {self.requests}"
        self.workers.failed(entry.worker.ref, "unreachable", request_id)
        model.health.failed("unreachable", request_id, self.clock.now_s, 0.0)
        self.clock.now_s += 60.0
        self.workers.probed(entry, HealthEvent.PROBE_PASSED)
        model.health.probed(HealthEvent.PROBE_PASSED, self.clock.now_s, 0.0)
        assert entry.health.state(self.clock.now_s) is HealthState.HALF_OPEN

    async def ask(self, outcomes: dict[Part, str], *, stream: bool) -> None:
        self.requests += 1
        request_id = f"r{self.requests}"
        self.engines.outcomes, self.engines.ended = outcomes, {}
        self.engines.prefilled.clear()
        body = b'{"model":"m","prompt":"hello","stream":%s}' % (b"true" if stream else b"false")
        api = api_of("/v1/completions")
        assert api is not None
        inbound = Inbound.read(api, body, request_id=request_id, arrived_s=self.clock.now_s)
        exchange = Exchange()
        answer = ClientAnswer(exchange, request_id, api.style)  # type: ignore[arg-type]
        record = RequestRecord(api.path, request_id, self.clock.now_s)
        await self.dispatcher.serve(inbound, answer, record)
        assert exchange.is_ended
        ended, self.engines.outcomes = dict(self.engines.ended), dict.fromkeys(Part, "ok")
        await asyncio.gather(*self.core._background)  # what gives P's blocks back tells nothing of D
        is_counted = False
        for part in (Part.PREFILL, Part.DECODE):  # in the order in which legs end
            model = self.models.get(part)
            if model is not None:
                said = ended.get(part)
                is_counted |= model.tell(said, request_id, self.clock.now_s, is_counted=is_counted)
        self.check()

    def check(self) -> None:
        for part, entry in self.entries.items():
            now_s, model = self.clock.now_s, self.models[part].health
            assert dataclasses.asdict(entry.health.account(now_s)) == dataclasses.asdict(model.account(now_s)), part
            assert entry.inflight == 0
            is_whole = entry.candidate(now_s).share == 1.0 and not entry.candidate(now_s).is_last_choice
            assert entry.is_ready(now_s) <= is_whole


STEPS = st.lists(
    st.tuples(
        st.sampled_from([None, Part.PREFILL, Part.DECODE]),
        st.sampled_from(OUTCOMES),
        st.sampled_from(OUTCOMES),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("name", sorted(DIALECTS))
@settings(max_examples=25)
@example(steps=[(Part.PREFILL, "ok", "ok", True), (None, "ok", "ok", True)])
@example(steps=[(Part.PREFILL, "error", "ok", False)])
@example(steps=[(Part.DECODE, "ok", "lost", True), (Part.DECODE, "ok", "ok", False)])
@given(steps=STEPS)
def test_a_leg_tells_its_verdict_before_its_claim_ends(
    name: str, steps: list[tuple[Part | None, str, str, bool]]
) -> None:
    async def play() -> None:
        world = World(name)
        for opened, prefill, decode, stream in steps:
            if opened is not None:
                world.open(opened)
            await world.ask({Part.PREFILL: prefill, Part.DECODE: decode}, stream=stream)

    asyncio.run(play())


@pytest.mark.parametrize("name", sorted(DIALECTS))
@pytest.mark.parametrize("part", list(Part))
def test_the_first_success_ends_the_trial(name: str, part: Part) -> None:
    async def play() -> HealthState | None:
        world = World(name)
        world.open(part)
        await world.ask(dict.fromkeys(Part, "ok"), stream=True)
        entry = world.entries.get(part)
        return None if entry is None else entry.health.state(world.clock.now_s)

    expected = None if (name, part) == ("plain", Part.PREFILL) else HealthState.SLOW_START
    assert asyncio.run(play()) is expected


def test_a_claim_that_was_released_takes_no_verdict() -> None:
    workers, _ = fleet()
    workers.replace("flags", [stock("d")])
    claim = workers.claim(workers.candidates()[0].member.ref, Part.DECODE, "r")
    claim.release()
    with pytest.raises(UsageError, match="released before it was told"):
        claim.succeeded()
    with pytest.raises(UsageError, match="released before it was told"):
        claim.failed("error")
