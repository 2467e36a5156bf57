"""Every public method judges its arguments before anything moves: a wrong one is a KvxferError that names it, and
nothing is left half done. One table of the whole public API, which fails for a method that it does not have."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer import (
    Agent,
    AgentConfig,
    AgentRef,
    CompatibilityRecord,
    DataAddress,
    Exposure,
    Grant,
    Incarnation,
    KvxferError,
    Lane,
    Member,
    MemoryNetwork,
    Op,
    Pool,
    PoolRecord,
    RegionRecord,
    Role,
    Segment,
    Transfer,
    TransferId,
    WorkerInfo,
    errors,
)
from kvxfer.types import Load

RECORD = CompatibilityRecord.opaque("m")
INCARNATION = Incarnation(1, bytes(16))
REF = AgentRef("other", INCARNATION)
ADDRESS = DataAddress("127.0.0.1", 1, "", "host")
INFO = WorkerInfo("other", Role.BOTH, "m", "")


class Wrong:
    """What no argument may be."""


MAKES: dict[type, dict[str, Any]] = {
    Agent: {"info": "a"},
    AgentConfig: {},
    AgentRef: {"agent_id": "a", "incarnation": INCARNATION},
    CompatibilityRecord: dataclasses.asdict(RECORD),
    DataAddress: dataclasses.asdict(ADDRESS),
    Incarnation: dataclasses.asdict(INCARNATION),
    Member: {"ref": REF, "info": INFO, "address": ADDRESS},
    PoolRecord: {
        "pool_id": 1,
        "record": RECORD,
        "block_count": 1,
        "block_bytes": 1,
        "exposure": Exposure.POOL,
        "is_shareable": False,
    },
    RegionRecord: {"region_id": 1, "address": 4096, "length_bytes": 1},
    Segment: {"offset_bytes": 0, "stride_bytes": 1, "length_bytes": 1},
    TransferId: {"raw": bytes(16)},
    WorkerInfo: {"agent_id": "a", "role": Role.BOTH, "model": "", "http_url": ""},
}
"""The classes that a program makes, with what they need."""

NAMED_AS = {"descriptors": "descriptor 0"}
MADE_BY_KVXFER = {
    *(Grant, Pool, Transfer, kvxfer.AgentPost, kvxfer.Delivery, kvxfer.MemoryRegistration),
    *(kvxfer.Notification, kvxfer.TransferResult),
}
TAKES_ANYTHING = {
    "CompatibilityRecord.matches": "a comparison: what is no record matches nothing",
    "MemoryNetwork": "of tests: docs/simulation.md",
}


class World:
    """An entered agent with one of everything."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.pool = agent.allocate_pool(RECORD, block_count=4, block_bytes=16)
        self.registration = agent.register(np.zeros(64, np.uint8))
        self.grant = agent.grant(self.pool, [3], transfer_id=TransferId(b"g" * 16))
        self.transfer: Transfer | None = None

    def of_peer(self) -> Any:
        """A list that was prepared for a peer."""
        self.agent.connect_peer(REF, ADDRESS, bytes(32))
        records = [RegionRecord(7, 4096, 64)]
        return self.agent.prepare([(4096, 1, 0)], peer="other", records=records)

    def state(self) -> Any:
        """What a refused call must not have changed."""
        agent = self.agent
        counts = agent._open().transport.counts()
        pools = [(pool.pool, pool.granted, pool.reserved, pool.quarantined) for pool in counts.pools]
        regions = [(region.region, region.grants, region.transfers) for region in counts.regions]
        return pools, regions, counts.grants.alive, counts.transfers_live, len(agent.pools), agent.members()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with Agent("a", token=b"t" * 64, network=MemoryNetwork(), config=AgentConfig(discovery=True)) as agent:
        yield World(agent)


def fresh(number: int = 0) -> TransferId:
    return TransferId(bytes([number]) * 16)


METHODS: dict[str, Callable[[World], dict[str, Any]]] = {
    "Agent.abort_grant": lambda world: {"transfer_id": fresh()},
    "Agent.abort_pull": lambda world: {"transfer_id": fresh(), "source": "other"},
    "Agent.add_remote_agent": lambda world: {"metadata": "x", "agent_id": "other"},
    "Agent.allocate_pool": lambda world: {"record": RECORD, "block_count": 1, "block_bytes": 1},
    "Agent.ask": lambda world: {"pool": world.pool, "count": 1, "transfer_id": fresh(), "source": "other"},
    "Agent.connect_peer": lambda world: {"ref": REF, "address": ADDRESS, "key": bytes(32)},
    "Agent.deregister": lambda world: {"registration": world.registration},
    "Agent.disconnect_peer": lambda world: {"ref": REF},
    "Agent.explain": lambda world: {"error": KvxferError("x")},
    "Agent.expect": lambda world: {"transfer_id": fresh()},
    "Agent.find_member": lambda world: {"agent_id": "other"},
    "Agent.grant": lambda world: {"pool": world.pool, "blocks": [0], "transfer_id": fresh()},
    "Agent.is_connected": lambda world: {"agent_id": "other"},
    "Agent.notify": lambda world: {"agent_id": "other", "payload": b""},
    "Agent.post": lambda world: {
        "op": Op.READ,
        "local": world.agent.prepare([(world.registration.record.address, 1, 0)]),
        "local_ids": None,
        "remote": world.of_peer(),
        "remote_ids": None,
    },
    "Agent.prepare": lambda world: {"descriptors": [(world.registration.record.address, 1, 0)]},
    "Agent.progress": lambda world: {"timeout_s": 0.0},
    "Agent.pull": lambda world: {"pool": world.pool, "blocks": [0], "transfer_id": fresh(), "source": "other"},
    "Agent.pulse": lambda world: {"has_work": True},
    "Agent.register": lambda world: {"memory": np.zeros(64, np.uint8)},
    "Agent.register_pool": lambda world: {"record": RECORD, "memory": np.zeros(64, np.uint8), "block_count": 4},
    "Agent.remove_pool": lambda world: {"pool": world.pool},
    "Agent.report_load": lambda world: {"load": Load()},
    "Agent.wait_member": lambda world: {"agent_id": "other", "timeout_s": 0.0},
    "Grant.bind": lambda world: {"reader": "other"},
    "Grant.on_ended": lambda world: {"callback": print},
    "Grant.ready": lambda world: {"blocks": 0},
    "Grant.revoke": lambda world: {},
    "Pool.describe": lambda world: {"record": RECORD},
    "Transfer.reserve": lambda world: {"blocks": [0]},
    "CompatibilityRecord.from_json": lambda world: {"text": "x"},
    "CompatibilityRecord.opaque": lambda world: {"format_name": "m"},
    "RegionRecord.from_json": lambda world: {"text": "x"},
    "TransferId.from_hex": lambda world: {"text": "x"},
}
"""Each public method that takes an argument, with arguments of the right kinds."""


def public_classes() -> list[type]:
    found = [getattr(kvxfer, name) for name in kvxfer.__all__]
    return [kind for kind in found if inspect.isclass(kind) and not issubclass(kind, (enum.Enum, KvxferError))]


def public_methods() -> dict[str, Any]:
    """Those with an argument, by name; inherited ones too."""
    found = {}
    for kind in public_classes():
        if kind.__name__ in TAKES_ANYTHING:
            continue
        for name, method in inspect.getmembers(kind, callable):
            if name.startswith("_") or inspect.isclass(method):
                continue
            parameters = [each for each in inspect.signature(method).parameters if each != "self"]
            if parameters and f"{kind.__name__}.{name}" not in TAKES_ANYTHING:
                found[f"{kind.__name__}.{name}"] = method
    return found


def test_the_table_has_every_public_method_and_class() -> None:
    assert sorted(METHODS) == sorted(public_methods())
    unlisted = {kind for kind in public_classes() if kind.__name__ not in TAKES_ANYTHING}
    assert unlisted == set(MAKES) | MADE_BY_KVXFER


def parameters_of(target: Any) -> list[str]:
    parameters = inspect.signature(target).parameters.values()
    return [each.name for each in parameters if each.name != "self" and each.kind is not each.VAR_POSITIONAL]


MADE = [pytest.param(kind, name, id=f"{kind.__name__}-{name}") for kind in MAKES for name in parameters_of(kind)]


@pytest.mark.parametrize(("kind", "name"), MADE)
def test_a_class_is_made_of_right_arguments_only(kind: type, name: str) -> None:
    kind(**MAKES[kind])
    with pytest.raises(KvxferError, match=name):
        kind(**{**MAKES[kind], name: Wrong()})


@pytest.mark.parametrize(
    ("method", "name"),
    [
        pytest.param(method, name, id=f"{method}-{name}")
        for method, function in public_methods().items()
        for name in parameters_of(function)
    ],
)
async def test_a_wrong_argument_is_named_and_nothing_moves(world: World, method: str, name: str) -> None:
    kind, _, function = method.partition(".")
    arguments = {**METHODS[method](world), name: Wrong()}
    if kind == "Transfer":
        world.transfer = world.agent.ask(world.pool, 1, transfer_id=fresh(9), source="other")
    whose = {"Agent": world.agent, "Grant": world.grant, "Pool": world.pool, "Transfer": world.transfer}.get(kind)
    before = world.state()
    with pytest.raises(KvxferError, match=NAMED_AS.get(name, name)):
        getattr(whose or getattr(kvxfer, kind), function)(**arguments)
    assert world.state() == before
    if world.transfer is not None:
        world.transfer.cancel()


WRONG_VALUES: list[tuple[str, dict[str, Any], str]] = [
    ("Agent.grant", {"blocks": [[0], [0, 1]]}, "blocks"),
    ("Agent.grant", {"blocks": "01"}, "blocks|indices"),
    ("Agent.grant", {"blocks": [0.5]}, "block indices"),
    ("Agent.grant", {"blocks": [-1]}, "block indices"),
    ("Agent.grant", {"blocks": [99]}, "block 99"),
    ("Agent.grant", {"ready_blocks": -1}, "ready_blocks"),
    ("Agent.grant", {"ready_blocks": True}, "ready_blocks"),
    ("Agent.grant", {"ready_blocks": 1 << 40}, "ready_blocks"),
    ("Agent.grant", {"ttl_s": float("nan")}, "ttl_s"),
    ("Agent.grant", {"content_digest": b"short"}, "content_digest"),
    ("Agent.pull", {"lanes": "stream"}, "lanes"),
    ("Agent.pull", {"lanes": ["streem"]}, "lanes"),
    ("Agent.pull", {"first": -1}, "first"),
    ("Agent.pull", {"timeout_s": float("inf")}, "timeout_s"),
    ("Agent.pull", {"source": "a"}, "itself"),
    ("Agent.ask", {"count": 0}, "count"),
    ("Agent.ask", {"count": -1}, "count"),
    ("Agent.ask", {"count": 1 << 40}, "count"),
    ("Agent.allocate_pool", {"block_count": -1}, "blocks"),
    ("Agent.register_pool", {"block_count": 0}, "block"),
    ("Agent.register_pool", {"memory": np.array([object()] * 8)}, "Python objects"),
    ("Agent.register_pool", {"memory": (1 << 70, 64)}, "memory"),
    ("Agent.register_pool", {"memory": (4096, -1)}, "memory"),
    ("Agent.register_pool", {"segments": []}, "segments"),
    ("Agent.register_pool", {"exposure": "everything"}, "exposure"),
    ("Agent.register_pool", {"checksum": "perhaps"}, "checksum"),
    ("Agent.connect_peer", {"key": b"short"}, "key"),
    ("Agent.notify", {"agent_id": "nobody"}, "nobody"),
    ("Grant.ready", {"blocks": -1}, "blocks"),
    ("Grant.ready", {"blocks": 1 << 40}, "blocks"),
    ("Grant.ready", {"blocks": 0, "layers": -1}, "layers"),
    ("Grant.bind", {"reader": "not a name"}, "agent id"),
]


@pytest.mark.parametrize(("method", "wrong", "named"), WRONG_VALUES, ids=lambda value: str(value)[:40])
async def test_a_value_that_cannot_be_is_named(world: World, method: str, wrong: dict[str, Any], named: str) -> None:
    kind, _, function = method.partition(".")
    before = world.state()
    whose = world.agent if kind == "Agent" else world.grant
    with pytest.raises(KvxferError, match=named):
        getattr(whose, function)(**{**METHODS[method](world), **wrong})
    assert world.state() == before


@pytest.mark.parametrize("method", ["notify", "post", "connect_peer", "disconnect_peer"])
async def test_another_thread_is_told_to_use_the_loop(world: World, method: str) -> None:
    arguments, raised = METHODS[f"Agent.{method}"](world), []

    def call() -> None:
        try:
            getattr(world.agent, method)(**arguments)
        except KvxferError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    (error,) = raised
    assert f"{method} is for the agent's loop" in str(error)


async def test_right_calls_come_through(world: World) -> None:
    """A lane may be named by its value, and numbers may be numpy's."""
    grant = world.agent.grant(world.pool, np.array([0], np.int64), transfer_id=fresh(1), ready_blocks=np.int64(1))  # type: ignore[arg-type]
    grant.ready(np.uint32(1), complete=True)  # type: ignore[arg-type]
    grant.revoke()
    transfer = world.agent.ask(world.pool, 1, transfer_id=fresh(2), source="other", lanes=["memory"])  # type: ignore[list-item]
    transfer.cancel()


def test_a_lane_that_is_none_is_refused_in_the_settings() -> None:
    for lanes in ("stream", ("streem",), (Lane.STREAM, 1)):
        with pytest.raises(errors.ConfigError, match="lanes must be a list of"):
            AgentConfig(lanes=lanes)  # type: ignore[arg-type]
