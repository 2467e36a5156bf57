"""The coordinator's members as workers: the words they are spoken to in, the ranks of an engine, the engines that share
an address. It must never know what became of them.

A member of dialect ``vllm`` runs kvxfer's connector: here that is ``vllm-kvxfer``, because ``vllm`` is an engine with a
connector of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import Counter

from kvxfer.protocol.leg_keys import leg_key
from kvxfer.router.fleet.worker import BOOTSTRAP_PORT, BOOTSTRAPPED_DIALECTS, EngineDialect, Worker, WorkerSource
from kvxfer.types import AgentRef, Dialect, Member, Membership

_DATA_PARALLEL = re.compile(r"_dp([0-9]{1,9})$")
"""The end of the name that vLLM gives to each engine of its data parallel."""


def workers_of(membership: Membership, leg_secret: bytes = b"") -> tuple[Worker, ...]:
    """Every member, those without HTTP too; with keys for their legs, which follow from ``leg_secret`` unless it is
    empty."""
    followers = {
        member.ref.agent_id
        for member in membership.members
        if member.info.dialect == Dialect.VLLM and not member.info.http_url
    }
    front_ends = Counter(member.info.http_url for member in membership.members if member.info.dialect == Dialect.VLLM)
    return tuple(
        _worker(member, followers, front_ends, _leg_key(leg_secret, member.ref) if member.info.http_url else "")
        for member in membership.members
    )


@functools.lru_cache(maxsize=1 << 15)
def _leg_key(secret: bytes, ref: AgentRef) -> str:
    return leg_key(secret, ref).hex() if secret else ""


def _worker(member: Member, followers: set[str], front_ends: Counter[str], key: str) -> Worker:
    info = member.info
    if info.dialect != Dialect.VLLM:
        port = BOOTSTRAP_PORT if info.dialect in BOOTSTRAPPED_DIALECTS else None
        return Worker(member, info.dialect, WorkerSource.COORDINATOR, bootstrap_port=port, leg_key=key)
    named = _DATA_PARALLEL.search(member.ref.agent_id)
    dialect = EngineDialect.VLLM_KVXFER
    return Worker(
        dataclasses.replace(member, info=dataclasses.replace(info, dialect=dialect)),
        dialect,
        WorkerSource.COORDINATOR,
        dp_rank=int(named[1]) if named is not None and front_ends[info.http_url] > 1 else None,
        # Agents that follow it by number without HTTP of their own are its other ranks.
        leg_key=key,
        ranks=next(rank for rank in itertools.count(1) if f"{member.ref.agent_id}.{rank}" not in followers),
    )
