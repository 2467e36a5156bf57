"""What must hold after a transfer, asked of the engines themselves."""

from __future__ import annotations

import asyncio
import time

from engines import Engine


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


async def wait_free(engine: Engine, blocks: int, within_s: float = 2.0) -> None:
    """So many blocks are free soon."""
    until_s = time.monotonic() + within_s
    while (free := await engine.ask("free")) != blocks:
        assert time.monotonic() < until_s, f"{engine.name} has {free} free blocks, not {blocks}, after {within_s} s"
        await asyncio.sleep(0.02)
