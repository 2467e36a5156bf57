"""Every fault of a coordinator and of an etcd node, alone and in pairs, under load: answers go on coming, no request
fails, no token is wrong, and the membership is whole again soon after the fault's end."""

from __future__ import annotations

import asyncio
import itertools
import pathlib
import time
from collections.abc import AsyncIterator

import numpy
import pytest
import pytest_asyncio

from tests.support.e2e.control import COORDINATORS, NODES, ControlPlane, Harm, PartFault, control_plane
from tests.support.e2e.load import LINES, Load, Witness
from tests.support.e2e.reference import Reference
from tests.support.etcd import needs_etcd
from tests.support.netns import obstacle

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    needs_etcd,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle()),
]

WHOLE_S = 5.0
"""After the end of a fault, on an idle machine; a busy one gets BUSY times as long."""
BUSY = 4
HOLD_S = 9.0
"""Longer than an agent's patience (3 s), a coordinator's lease (5 s), and the grace of its agents after that (3 s)."""
LONG_HOLD_S = 5.0
"""In a fault that lasts so long, answers must come: one a second at least, and more than were on their way before."""
REMOTE_SHARE = 0.5
"""More of the prompts than that are computed by prefill workers, which no fault here befalls."""
NUMBER_S = 10.0
"""How soon a new agent gets its number while a fault lasts: etcd chooses another leader meanwhile."""
PAUSE_S = 0.1
RANDOM_SEED = 30
RANDOM_FAULTS = 20

_seeds = itertools.count(1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plane(tmp_path_factory: pytest.TempPathFactory, tiny_model: pathlib.Path) -> AsyncIterator[ControlPlane]:
    async with control_plane(tmp_path_factory.mktemp("plane"), tiny_model) as started:
        yield started


async def survive(plane: ControlPlane, reference: Reference, faults: list[PartFault], hold_s: float) -> None:
    """All ``faults`` at once for ``hold_s``, under load, and what must hold then."""
    what = " and ".join(map(str, faults))
    await plane.settled(60.0)
    await plane.whole(60.0, for_s=0.0)
    before = await plane.incarnations()
    lines = Load(*plane.routers, reference=reference, pause_s=PAUSE_S, seed=next(_seeds))
    async with lines as load, Witness(plane.incarnations) as witness:
        await load.some(3)
        began_s = time.monotonic()
        await asyncio.gather(*map(plane.begin, faults))
        done_before = load.done
        await plane.fresh_number(NUMBER_S)
        numbered_s = time.monotonic() - began_s
        await asyncio.sleep(max(0.0, began_s + hold_s - time.monotonic()))
        done_meanwhile = load.done - done_before
        assert all(await asyncio.gather(*map(plane.is_felt, faults)))
        await asyncio.gather(*map(plane.prepare_end, faults))
        ended_s = time.monotonic()
        await asyncio.gather(*map(plane.end, faults))
        started_s = time.monotonic() - ended_s
        took_s = started_s + await plane.whole(WHOLE_S * BUSY)
        await load.some(3)
    print(
        f"{what}: {load.done} answers, {load.remote} remote, {done_meanwhile} while it held; a new number after "
        f"{numbered_s:.2f} s; membership whole {took_s:.2f} s after the end of {hold_s:.1f} s"
    )
    assert load.failed == []
    assert load.wrong == []
    assert load.remote > REMOTE_SHARE * load.done
    if hold_s >= LONG_HOLD_S:
        assert done_meanwhile > max(hold_s, 2 * LINES)
    assert witness.other == []
    assert took_s <= WHOLE_S * BUSY
    assert await plane.incarnations() == before
    await plane.fresh_number(NUMBER_S)


async def victim(plane: ControlPlane, kind: str) -> str:
    """The part whose loss costs most."""
    return await (plane.busiest_coordinator() if kind == "coordinator" else plane.leading_node())


IN_EVERY_CHANGE = [("etcd", Harm.PARTITION)]
"""The others of these run every night. Kill and stop: see test_several_coordinators too."""


@pytest.mark.parametrize(
    ("kind", "harm"),
    [
        pytest.param(kind, harm, marks=[] if (kind, harm) in IN_EVERY_CHANGE else [pytest.mark.nightly])
        for kind in ("coordinator", "etcd")
        for harm in Harm
    ],
)
async def test_one_fault(plane: ControlPlane, tiny_reference: Reference, kind: str, harm: Harm) -> None:
    await survive(plane, tiny_reference, [PartFault(harm, await victim(plane, kind))], HOLD_S)


@pytest.mark.nightly
@pytest.mark.parametrize("node_harm", Harm)
@pytest.mark.parametrize("harm", Harm)
async def test_a_coordinator_and_an_etcd_node_at_once(
    plane: ControlPlane, tiny_reference: Reference, harm: Harm, node_harm: Harm
) -> None:
    faults = [PartFault(harm, await victim(plane, "coordinator")), PartFault(node_harm, await victim(plane, "etcd"))]
    await survive(plane, tiny_reference, faults, HOLD_S)


def random_faults() -> list[tuple[list[PartFault], float]]:
    """What is hurt at once, and for how many seconds; the same each time."""
    generator = numpy.random.Generator(numpy.random.PCG64(RANDOM_SEED))
    harms = list(Harm)
    drawn = []
    for _ in range(RANDOM_FAULTS):
        parts = [[COORDINATORS], [NODES], [COORDINATORS, NODES]][generator.integers(3)]
        faults = [PartFault(harms[generator.integers(len(harms))], of[generator.integers(len(of))]) for of in parts]
        drawn.append((faults, float(generator.uniform(0.5, 12.0))))
    return drawn


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(RANDOM_FAULTS))
async def test_random_faults(plane: ControlPlane, tiny_reference: Reference, number: int) -> None:
    faults, hold_s = random_faults()[number]
    await survive(plane, tiny_reference, faults, hold_s)
