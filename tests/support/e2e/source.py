"""A prefill worker inside the test's process: its own agent, its own pool, which the test may write into as no worker
would. Decides nothing by itself; what it grants and announces is what a real worker grants and announces.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch

from kvxfer.agent import Agent
from kvxfer.engine.block_digests import BlockDigests
from kvxfer.engine.runner import Chunk, Runner
from kvxfer.rpc import load_token
from kvxfer.types import Role, TransferId, WorkerInfo
from tests.support.e2e.cluster import Cluster
from tests.support.e2e.reference import Reference

BLOCK_TOKENS = 16
BLOCKS = 128


class Source:
    """Agent ``source`` of a cluster."""

    AGENT_ID = "source"

    def __init__(self, agent: Agent, reference: Reference) -> None:
        model = reference.model
        self.agent = agent
        self.pool = agent.allocate_pool(
            model.record(BLOCK_TOKENS), block_count=BLOCKS, block_bytes=model.block_bytes(BLOCK_TOKENS)
        )
        storage = torch.from_numpy(self.pool.array)
        self._runner = Runner(model, storage, block_count=BLOCKS, block_tokens=BLOCK_TOKENS)
        self._digests = BlockDigests(storage, model.layers)

    def compute(self, prompt: Sequence[int]) -> list[int]:
        """Compute the prompt but its last token into the first blocks; which these are."""
        blocks = list(range(-(-(len(prompt) - 1) // BLOCK_TOKENS)))
        self._runner.forward([Chunk(list(prompt[:-1]), 0, blocks, False)])
        return blocks

    def digests(self, transfer_id: TransferId, blocks: Sequence[int]) -> list[list[str]]:
        """What a worker records when it announces the last block."""
        self._digests.record(transfer_id, "source", blocks, first=0)
        layers: list[list[str]] = self._digests.as_dict()[f"{transfer_id}/source"]["blocks"]
        return layers

    def flip(self, block: int, layer: int, *, values: int) -> None:
        """Corrupt a layer of a block: the signs of its first ``values`` numbers (one bit of one byte of each)."""
        layer_bytes = self.pool.block_bytes // self._runner.model.layers
        start = layer * layer_bytes
        self.pool.array[block, start : start + 4 * values].reshape(values, 4)[:, 3] ^= 0x80

    @property
    def layer_values(self) -> int:
        return self.pool.block_bytes // self._runner.model.layers // 4


@contextlib.asynccontextmanager
async def serving_source(
    cluster: Cluster, reference: Reference, *, http_url: str = "", **more: Any
) -> AsyncIterator[Source]:
    """A source in the cluster; ``http_url`` is where it says that it serves HTTP, which it does not."""
    info = WorkerInfo(Source.AGENT_ID, Role.PREFILL, reference.model.name, http_url, 0, BLOCK_TOKENS)
    agent = Agent(info, coordinator=cluster.address, token=load_token(cluster.token_file), **more)
    source = Source(agent, reference)
    async with agent:
        yield source
