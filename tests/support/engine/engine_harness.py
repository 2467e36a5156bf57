"""What the engine's tests share: engines over the tiny model, joined by fake agents, and their invariants."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch

from kvxfer.engine.block_digests import BlockDigests
from kvxfer.engine.engine import Engine
from kvxfer.engine.executor import Executor
from kvxfer.engine.model import LoadedModel
from kvxfer.engine.request import Leg, OtherLeg, Outcome, PrefillOutcome, Request
from kvxfer.engine.runner import Runner
from kvxfer.engine.sampling import SamplingParams
from kvxfer.engine.scheduler import SchedulerLimits
from kvxfer.types import TransferId
from tests.support.engine.fake_agent import FakeAgent, FakePool, World

BLOCK_TOKENS = 16


@dataclasses.dataclass
class Worker:
    engine: Engine
    pool: FakePool
    digests: BlockDigests | None

    @property
    def executor(self) -> Executor:
        return self.engine.executor

    async def check_idle(self, timeout_s: float = 5.0) -> None:
        """Every block is back, and the pool's counters agree."""
        end_s = asyncio.get_running_loop().time() + timeout_s
        while asyncio.get_running_loop().time() < end_s:
            if self.executor.scheduler.is_empty and self.executor.pool.statistics().used == 0:
                break
            await asyncio.sleep(0.01)
        assert self.executor.pool.statistics().used == 0, repr(self.engine)
        assert self.executor.scheduler.is_empty
        assert not self.executor.is_busy
        self.executor.pool.check_integrity()


@asynccontextmanager
async def running(
    model: LoadedModel, world: World | None, agent_id: str, *, blocks: int = 64, digests: bool = False, **options: Any
) -> AsyncIterator[Worker]:
    limits = {
        name: options.pop(name)
        for name in ("chunk_tokens", "max_batch_tokens", "max_running", "max_waiting")
        if name in options
    }
    pool = FakePool(blocks, model.block_bytes(BLOCK_TOKENS))
    storage = torch.from_numpy(pool.array)
    runner = Runner(model, storage, block_count=blocks, block_tokens=BLOCK_TOKENS)
    recorder = BlockDigests(storage, model.layers) if digests else None
    executor = Executor(model, runner, SchedulerLimits(**limits), digests=recorder, **options)
    agent = FakeAgent(world, agent_id) if world is not None else None
    engine = Engine(executor, agent=agent, agent_pool=pool)
    engine.start()
    worker = Worker(engine, pool, recorder)
    try:
        yield worker
        assert engine.failure is None
        await worker.check_idle()
    finally:
        await engine.stop(0.0)
    assert engine.failure is None


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def make_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(3, 300, (length,), generator=generator).tolist())


def new_id() -> TransferId:
    return TransferId(secrets.token_bytes(16))


def reference(model: LoadedModel, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers' own ``generate`` says."""
    ids = torch.tensor([list(prompt)])
    out = model.module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


async def answer(engine: Engine, request: Request) -> tuple[list[int], str, Outcome]:
    """Run a request to its end: (tokens, text, outcome)."""
    tokens: list[int] = []
    text = ""
    async with engine.submit(request) as generation:
        async for delta in generation:
            tokens += delta.token_ids
            text += delta.text
        return tokens, text, generation.outcome


async def prefill(engine: Engine, request: Request) -> PrefillOutcome:
    async with engine.submit(request) as generation:
        return await generation.wait_prefilled()


def legs(
    prompt: Sequence[int], params: SamplingParams, transfer_id: TransferId | None = None
) -> tuple[Request, Request]:
    """The prefill leg for agent ``p`` and the decode leg for agent ``d`` of one request."""
    transfer_id = transfer_id or new_id()
    name = str(transfer_id)[:8]
    return (
        Request(f"p-{name}", tuple(prompt), params, Leg.PREFILL, OtherLeg(transfer_id, "d")),
        Request(f"d-{name}", tuple(prompt), params, Leg.DECODE, OtherLeg(transfer_id, "p")),
    )
