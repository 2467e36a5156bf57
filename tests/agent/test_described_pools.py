"""Pools whose owner learns what their blocks are, or knows it no more, while they are in use."""

from __future__ import annotations

import dataclasses

import pytest

from kvxfer import Agent
from kvxfer.errors import IncompatibleError, WeightsUnknownError
from kvxfer.types import unknown_fingerprint
from tests.support.agents import RECORD, fresh_id

Pair = tuple[Agent, Agent]


async def test_a_pool_described_anew_is_judged_by_that_from_then_on(source: Agent, destination: Agent) -> None:
    """What the destination knows of the source is old: the source's own transport judges."""
    unknown = dataclasses.replace(RECORD, weights_fingerprint=unknown_fingerprint("they changed", b"n" * 16))

    async def pull() -> None:
        transfer_id = fresh_id()
        source.grant(source.pools[0], [1], transfer_id=transfer_id, ready_blocks=1)
        await destination.pull(destination.pools[0], [1], transfer_id=transfer_id, source="source")

    await pull()
    source.pools[0].describe(unknown)
    assert source.pools[0].record == unknown
    with pytest.raises(IncompatibleError, match="compatibility records"):
        await pull()
    source.pools[0].describe(RECORD)
    await pull()
    destination.pools[0].describe(unknown)
    with pytest.raises(WeightsUnknownError, match="weights_fingerprint is not known: here they changed") as caught:
        await pull()
    assert (caught.value.code, caught.value.field) == ("weights_unknown", "weights_fingerprint")
