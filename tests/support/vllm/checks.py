"""What must hold after a transfer, asked of the engines themselves."""

from __future__ import annotations

import asyncio
import os
import random
import time

from tests.support.vllm.engines import Engine

BLOCKS = 63
"""Of 64: vLLM keeps one for itself."""


TRIES = 6
STARVED = ("peer_gone", "deadline")
"""With these a load ends whose source did not run for seconds. vLLM's workers spin for each other, which starves the
agents in them where there are fewer cores than workers: then a prompt is computed, and comes again, TRIES times."""
BARS = os.environ.get("BARS") == "1"
"""Whether times are judged as on a machine that does nothing else: `BARS=1`. Else only that they are of that order."""


def within(seconds: float) -> float:
    """What a time that should be ``seconds`` is held to."""
    return seconds if BARS else 5.0 * seconds


def prompt(length: int, seed: object = 0) -> list[int]:
    """Token ids that no other length or seed begins with."""
    draw = random.Random(f"{length}/{seed}")
    return [draw.randrange(3, 1000) for _ in range(length)]


async def assert_same_bytes(prefill: Engine, decode: Engine, transfer_id: str) -> None:
    """Every block that arrived is, layer by layer, what the source sent."""
    sent = [rows for key, rows in (await prefill.ask("digests")).items() if key.startswith(f"{transfer_id}/source/")]
    arrived = {key: rows for key, rows in (await decode.ask("digests")).items() if key.startswith(transfer_id)}
    assert len(sent) == 1
    assert len(arrived) == 1
    (key, rows), (source,) = next(iter(arrived.items())), sent
    first = int(key.rsplit("/", 1)[1])
    assert len(rows) == len(source) == 4
    assert all(row == whole[first:] for row, whole in zip(rows, source, strict=True))


async def wait_free(engine: Engine, blocks: int = BLOCKS, within_s: float = 1.0) -> None:
    """So many blocks are free soon."""
    until_s = time.monotonic() + within(within_s)
    while (free := await engine.ask("free")) != blocks:
        assert time.monotonic() < until_s, f"{engine.name} has {free} free blocks, not {blocks}, after {within_s} s"
        await asyncio.sleep(0.02)
