"""One request in an engine: its sequences, the KV that it fetches or holds, and its answer.

Decides in which order the parts of a request happen: fetch, compute, hold, answer. It must never know HTTP's framing,
nor which clock makes tokens. Every way in which a request can end frees its blocks.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from kvxfer.errors import GrantExpiredError, KvxferError
from kvxfer.mock_engine.asked import AnswerApi, AskedAnswer
from kvxfer.mock_engine.choice import ChoiceText, choices_of
from kvxfer.mock_engine.claims import KvClaim, KvClaims
from kvxfer.mock_engine.faults import FaultKind, MockFault
from kvxfer.mock_engine.generation import EnginePace, MockGeneration
from kvxfer.mock_engine.holds import KvHold, KvHolds
from kvxfer.mock_engine.legs import EngineLeg, LegDialect, LegPart
from kvxfer.mock_engine.options import EngineKind, LoadFailurePolicy, MockEngineOptions
from kvxfer.mock_engine.other_shapes import shape_of
from kvxfer.mock_engine.responder import Responder
from kvxfer.mock_engine.shape import TokenTotals, to_json
from kvxfer.mock_engine.statistics import EngineCounts, EngineTimes
from kvxfer.mock_engine.transfer_answers import LegTimes, ToldNumbers, decode_report, nixl_params, prefilled_body
from kvxfer.openai.errors import RequestError


class ServingEngine(Protocol):
    """The engine, as far as one request needs it."""

    options: MockEngineOptions
    engine_id: str
    port: int
    most_tokens: int
    """Of a prompt and its answer."""
    pace: EnginePace
    holds: KvHolds
    claims: KvClaims
    counts: EngineCounts
    times: EngineTimes

    def keys_for(self, choice: ChoiceText, salt: str) -> list[int]:
        """The keys of the blocks of a sequence, if its prefix may be cached."""

    def block_ids(self, generations: list[MockGeneration]) -> tuple[int, ...]:
        """The blocks that hold the prompts of ``generations``."""

    def transfer_s(self, tokens: int) -> float:
        """How long KV of so many tokens takes to come."""

    def error_bytes(self, error: BaseException, leg: EngineLeg) -> tuple[int, bytes]:
        """Status and body of an error."""

    def ended(self, exchange: MockExchange) -> None:
        """The request is over, whatever its end."""


def _first_of(errors: ExceptionGroup[Exception]) -> KvxferError:
    """The first error of kvxfer's tree in the group; any other is a fault of this program, and raised."""
    known, other = errors.split(KvxferError)
    if other is not None or known is None:
        raise errors
    first = known.exceptions[0]
    return first if isinstance(first, KvxferError) else _first_of(known)


class MockExchange:
    """Made for one request, and begun with :meth:`start`."""

    def __init__(
        self,
        engine: ServingEngine,
        responder: Responder,
        asked: AskedAnswer,
        leg: EngineLeg,
        request_id: str,
        fault: MockFault | None = None,
    ) -> None:
        self._engine = engine
        self._responder = responder
        self._asked = asked
        self._leg = leg
        self._request_id = request_id
        self._fault = fault.kind if fault is not None else None
        self._told = ToldNumbers(fault if self._fault is FaultKind.LIE else None)
        if leg.part is LegPart.PREFILL and leg.dialect in (LegDialect.SGLANG, LegDialect.KVXFER):
            asked.max_tokens, asked.is_default_length = 1, False
        self._check_length()
        self._choices = choices_of(asked)
        self._shape = shape_of(asked, self._choices, f"{asked.api.value}-{request_id}")
        holds = leg.part is LegPart.PREFILL
        is_remote = leg.part is LegPart.DECODE and not leg.is_incomplete
        self._generations = [self._generation(choice, holds, is_remote) for choice in self._choices]
        self._by_key = self._grouped()
        self._unfinished = len(self._generations)
        self._claims: dict[str, KvClaim] = {}
        self._loading: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._timers: set[asyncio.TimerHandle] = set()
        self._is_over = False
        self._failure: KvxferError | None = None
        """Why the prompt was computed here although its KV should have come."""
        self._loop = asyncio.get_running_loop()
        self._times = LegTimes(self._loop.time())
        self._streams = asked.stream and not leg.answers_without_text

    def _check_length(self) -> None:
        """Before anything as long as the answer is made. Raises RequestError in vLLM's words."""
        most, wanted = self._engine.most_tokens, self._asked.max_tokens
        prompt = max(one.count for one in self._asked.prompts)
        if prompt + wanted > most:
            raise RequestError(
                f"This model's maximum context length is {most} tokens. However, you requested {wanted} output tokens "
                f"and your prompt contains {prompt} input tokens, for a total of {prompt + wanted} tokens.",
                param="input_tokens",
            )

    def _generation(self, choice: ChoiceText, holds: bool, is_remote: bool) -> MockGeneration:
        keys = self._engine.keys_for(choice, self._asked.salt)
        return MockGeneration(self, choice, keys, is_remote=is_remote, holds=holds)

    def _grouped(self) -> dict[str, list[MockGeneration]]:
        """The sequences under each key."""
        keys, generations = self._leg.keys, self._generations
        if len(keys) == 1 and len(generations) > 1 and self._leg.dialect is LegDialect.SGLANG:
            first = int(keys[0].partition(":")[2])
            keys = tuple(f"sglang:{first + index}" for index in range(len(generations)))
        if len(keys) == len(generations):
            return {key: [generation] for key, generation in zip(keys, generations, strict=True)}
        if len(keys) > 1:
            raise RequestError(f"{len(keys)} rooms for {len(generations)} sequences", param="bootstrap_room")
        return {key: generations for key in keys}

    def start(self) -> None:
        """Begin. Raises DoesNotFitError where the engine can never hold it."""
        leg, engine = self._leg, self._engine
        if self._streams and self._sends_head_at_once():
            self._responder.begin()
        if leg.part is LegPart.PREFILL and leg.dialect is LegDialect.SGLANG:
            self._task = self._loop.create_task(self._after_readers())
        elif leg.part is LegPart.DECODE and leg.is_incomplete:
            engine.counts.silent_recomputes += 1
            self._run()
        elif leg.part is LegPart.DECODE:
            self._task = self._loop.create_task(self._fetch())
        else:
            self._run()

    def _sends_head_at_once(self) -> bool:
        """vLLM sends the head of a stream before its first token is there; SGLang and kvxfer's engine wait for it."""
        kind, dialect = self._engine.options.kind, self._leg.dialect
        if kind is EngineKind.ANY:
            return dialect not in (LegDialect.SGLANG, LegDialect.KVXFER)
        return kind is EngineKind.VLLM

    def client_left(self) -> None:
        """Nothing more can be answered: end, and free what is held."""
        if not self._is_over:
            self._end()

    def on_token(self, generation: MockGeneration) -> None:
        sequence = generation.sequence
        number = sequence.emitted - 1
        framed = b""
        if self._streams:
            framed = self._shape.token(generation.choice, number) if number else self._first(generation)
        elif not number:
            self._has_first(generation)
        if sequence.emitted < sequence.output_tokens:
            if framed:
                self._responder.chunk(framed)
            return
        self._unfinished -= 1
        if self._unfinished:
            if framed:
                self._responder.chunk(framed)
        elif self._leg.part is LegPart.PREFILL:
            self._prefilled(framed)
        else:
            self._answer(framed, {})

    def on_room(self, generation: MockGeneration) -> None:
        seconds = self._engine.transfer_s(generation.sequence.prompt_tokens)
        self._times.room_s = self._loop.time()
        if seconds:
            timer: asyncio.TimerHandle | None = None

            def loaded() -> None:
                if timer is not None:
                    self._timers.discard(timer)
                self._loaded(generation)

            timer = self._loop.call_later(seconds, loaded)
            self._timers.add(timer)
        else:
            self._loaded(generation)

    def _first(self, generation: MockGeneration) -> bytes:
        self._has_first(generation)
        if not self._responder.begun:
            self._responder.begin()
        return self._shape.begin(generation.choice) + self._shape.token(generation.choice, 0)

    def _has_first(self, generation: MockGeneration) -> None:
        self._shape.cached[generation.choice.index] = self._told.cached(self._cached(generation))
        if self._times.first_s is None:
            self._times.first_s = self._loop.time()
        self._engine.times.first_token(self._seconds())

    def _run(self) -> None:
        for generation in self._generations:
            self._engine.pace.start(generation)

    async def _fetch(self) -> None:
        """Get the KV from the prefill engine, then generate. Also a request that has ended meanwhile tells the prefill
        engine that its blocks are free.
        """
        engine, leg = self._engine, self._leg
        wait_s = 0.0 if leg.dialect is LegDialect.NIXL else leg.timeout_s or engine.options.kv_wait_s
        try:
            if self._fault is FaultKind.LOAD:
                raise GrantExpiredError("the KV cannot be loaded: a fault on command")
            async with asyncio.TaskGroup() as group:
                for key in self._by_key:
                    group.create_task(self._claim(key, wait_s))
            if not self._is_over:
                self._times.granted_s = self._loop.time()
                self._run()
        except ExceptionGroup as errors:
            self._release_all()
            self._load_failed(_first_of(errors))
        except KvxferError as error:
            self._release_all()
            self._load_failed(error)
        finally:
            if self._is_over:
                self._release_all()

    async def _claim(self, key: str, wait_s: float) -> None:
        self._claims[key] = await self._engine.claims.claim(key, self._leg.source, wait_s)
        self._loading[key] = len(self._by_key[key])

    def _load_failed(self, error: KvxferError) -> None:
        if self._is_over:
            return
        engine = self._engine
        engine.counts.load_failures += 1
        if engine.options.kv_load_failure_policy is LoadFailurePolicy.FAIL:
            self.fail(error)
            return
        engine.counts.recomputes += 1
        self._failure = error
        for generation in self._generations:
            generation.sequence.remote_tokens = 0
        self._run()

    def _loaded(self, generation: MockGeneration) -> None:
        if self._is_over:
            return
        self._times.loaded_s = self._loop.time()
        for key, generations in self._by_key.items():
            if generation in generations:
                self._loading[key] -= 1
                if not self._loading[key]:
                    self._release(key)
        self._engine.pace.loaded(generation, generation.sequence.prompt_tokens)

    def _release(self, key: str) -> None:
        claim = self._claims.pop(key, None)
        if claim is not None and self._fault is not FaultKind.KEEP:
            self._engine.claims.release(claim)

    def _release_all(self) -> None:
        for key in list(self._claims):
            self._release(key)

    async def _after_readers(self) -> None:
        """SGLang's prefill engine computes a prompt only once its decode engine has room for it."""
        try:
            for key in self._by_key:
                await self._engine.holds.wait_reader(key, self._engine.options.kv_wait_s)
            self._run()
        except KvxferError as error:
            self.fail(error)

    def _prefilled(self, framed: bytes) -> None:
        """All prompts are computed: hold them, and answer; SGLang answers when they were fetched."""
        engine, leg = self._engine, self._leg
        holds = []
        for key, generations in self._by_key.items():
            ids = engine.block_ids(generations)
            holds.append(engine.holds.hold(key, generations, len(ids), ids))
        if leg.dialect is LegDialect.SGLANG:
            self._task = self._loop.create_task(self._after_fetches(holds, framed))
        elif leg.answers_without_text:
            self._over("stop")
            first, now_s = self._generations[0], self._loop.time()
            body = prefilled_body(first, self._asked.model, self._request_id, leg, self._times, now_s, self._told)
            self._responder.answer(200, to_json(body))
        elif leg.dialect is LegDialect.NIXL:
            params = nixl_params(holds[0], engine.engine_id, engine.options.host, engine.port, self._told)
            self._answer(framed, {"kv_transfer_params": params})
        else:
            self._answer(framed, {})

    async def _after_fetches(self, holds: list[KvHold], framed: bytes) -> None:
        counts = self._engine.holds.counts
        expired = counts.expired
        for hold in holds:
            if hold.key in self._engine.holds:
                hold.ended = self._loop.create_future()
                await hold.ended
        if counts.expired > expired:
            self.fail(GrantExpiredError("the decode engine did not fetch the KV in time"))
        else:
            self._answer(framed, {})

    def _answer(self, framed: bytes, extra: dict[str, Any]) -> None:
        if self._leg.dialect is LegDialect.KVXFER and self._leg.part is LegPart.DECODE:
            blocks = -(-self._choices[0].prompt.count // self._engine.options.block_size)
            first, now_s = self._generations[0], self._loop.time()
            report = decode_report(first, self._leg, blocks, self._times, now_s, self._failure, self._told)
            extra = {**extra, "kvxfer": report}
        totals = self._totals()
        self._over(self._choices[0].finish_reason)
        if self._streams:
            self._responder.end(framed + self._shape.end(totals, extra if "kvxfer" in extra else {}))
        else:
            if self._engine.options.kind is EngineKind.VLLM and self._asked.api in (
                AnswerApi.COMPLETION,
                AnswerApi.CHAT,
            ):
                extra = {"kv_transfer_params": None, **extra}
            self._responder.answer(200, self._shape.whole(totals, extra))

    def _seconds(self) -> float:
        return self._loop.time() - self._times.arrived_s

    def _cached(self, generation: MockGeneration) -> int:
        """Prompt tokens that count as cached. Behind a transfer vLLM counts those that came from P too, so that D tells
        all but the last token, whatever its own cache had.
        """
        sequence = generation.sequence
        is_vllm = self._leg.dialect in (LegDialect.NIXL, LegDialect.MOONCAKE) or (
            self._leg.dialect is LegDialect.KVXFER and self._engine.options.kind is EngineKind.VLLM
        )
        return sequence.cached_tokens + (sequence.loaded_tokens if is_vllm else 0)

    def _totals(self) -> TokenTotals:
        options = self._engine.options
        prompt = completion = cached = 0
        for generation in self._generations:
            completion += generation.sequence.emitted
            if generation.choice.index % self._asked.n == 0:
                prompt += generation.sequence.prompt_tokens
                cached += self._shape.cached[generation.choice.index]
        # SGLang leaves the details out where nothing was cached.
        has_details = options.prompt_tokens_details and (cached > 0 or options.kind is not EngineKind.SGLANG)
        return TokenTotals(prompt, completion, cached, has_details=has_details)

    def fail(self, error: BaseException) -> None:
        """End with an error: a status, or the last event of a stream that has begun."""
        if self._is_over:
            return
        self._end()
        self._engine.counts.failed += 1
        status, body = self._engine.error_bytes(error, self._leg)
        if self._responder.begun:
            payload = b"data: " + body + b"\n\ndata: [DONE]\n\n"
            self._responder.end(b"%x\r\n%b\r\n" % (len(payload), payload))
        else:
            self._responder.answer(status, body)

    def _over(self, reason: str) -> None:
        """It ended well: held blocks stay until they are released."""
        self._is_over = True
        self._engine.counts.finish(reason)
        self._engine.times.whole(self._seconds())
        self._engine.ended(self)

    def _end(self) -> None:
        """It ended early."""
        self._is_over = True
        for timer in self._timers:
            timer.cancel()
        is_fetching = self._leg.part is LegPart.DECODE and self._task is not None and not self._task.done()
        if self._task is not None and not is_fetching and self._task is not asyncio.current_task():
            self._task.cancel()
        if self._leg.part is LegPart.PREFILL:
            for key in self._by_key:
                self._engine.holds.drop(key, f"the prefill of {key} was aborted")
        for generation in self._generations:
            self._engine.pace.stop(generation)
        if not is_fetching:
            self._release_all()
        self._engine.ended(self)
