"""Names that both sides of a transfer compute by themselves: agents of an engine's ranks, transfers within one request,
and what a prompt's blocks hold.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence

from kvxfer.types import TransferId

DIRECT = 0
"""The part of a request that is the whole prompt, granted once it is computed."""

_PART = struct.Struct("<16sIIII")


def rank_agent(base: str, rank: int) -> str:
    """The agent of tensor-parallel rank ``rank`` of the engine whose first agent is ``base``."""
    return base if rank == 0 else f"{base}.{rank}"


def is_rank_of(agent: str, base: str) -> bool:
    """Whether ``agent`` is a rank of the engine whose first agent is ``base``."""
    return agent == base or (agent.startswith(f"{base}.") and agent[len(base) + 1 :].isdecimal())


def engine_of(agent: str, rank: int) -> str:
    """The first agent of the engine whose rank ``rank`` that agent is."""
    return agent.removesuffix(f".{rank}") if rank else agent


def part_id(transfer_id: TransferId, source_rank: int, destination_rank: int, part: int, store: int) -> TransferId:
    """The id of the transfer of one part of a request between two ranks. ``store``: the number of the source's storage
    (pool) that the part is in."""
    content = _PART.pack(transfer_id.raw, source_rank, destination_rank, part, store)
    return TransferId(hashlib.blake2b(content, digest_size=16).digest())


def content_of(token_ids: Sequence[int], ranks: int, beside: Sequence[str] = ()) -> bytes:
    """The digest of what the blocks of these tokens hold, in an engine whose heads are divided among ``ranks`` ranks.
    ``beside``: what the blocks depend on besides the token ids, such as an adapter.

    It is the SHA-256 of: the SHA-256 of ``beside`` as JSON; the number of ranks; the token ids. Numbers are
    little-endian uint32."""
    whole = hashlib.sha256(hashlib.sha256(json.dumps(beside).encode()).digest())
    whole.update(struct.pack(f"<{1 + len(token_ids)}I", ranks, *token_ids))
    return whole.digest()


def blocks_for(tokens: int, block_tokens: int) -> int:
    """How many blocks hold ``tokens`` tokens."""
    return -(-tokens // block_tokens)
