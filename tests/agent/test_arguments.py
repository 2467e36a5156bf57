"""Every public method judges its arguments before anything moves: a wrong one is a KvxferError that names it, and
nothing is left half done. One table of the whole public API, which fails for a method that it does not have."""

from __future__ import annotations

import array
import contextlib
import ctypes
import dataclasses
import enum
import inspect
import mmap
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import torch

import kvxfer
from kvxfer import (
    Agent,
    AgentConfig,
    AgentRef,
    CompatibilityRecord,
    DataAddress,
    Exposure,
    Grant,
    GrantState,
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
from kvxfer.transport.host_memory import region_of
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


EXTREMES: dict[str, list[Any]] = {
    "str": ["\ud800", "a" * 5000, "\0"],
    "int": [10**30, -(10**30), 1 << 63, -1],
    "float": [10**400, -(10**400), float("nan"), float("inf"), -1.0],
    "bytes": [bytes(1 << 20), b""],
    "npt.ArrayLike": [[10**30], np.zeros((2, 2)), ["\ud800"]],
}
"""By the annotation: values of the right kind that no argument may be, or hardly one."""


def extremes_of(target: Any) -> list[tuple[str, Any]]:
    parameters = inspect.signature(target).parameters.values()
    kinds = {each.name: str(each.annotation).partition(" | None")[0] for each in parameters if each.name != "self"}
    return [(name, value) for name, kind in kinds.items() for value in EXTREMES.get(kind, [])]


def no_bare_error(call: Callable[[], Any]) -> None:
    with contextlib.suppress(KvxferError):
        call()


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        pytest.param(method, name, value, id=f"{method}-{name}-{value!r:.12}")
        for method, function in public_methods().items()
        for name, value in extremes_of(function)
    ],
)
async def test_an_extreme_value_is_taken_or_refused_by_name(world: World, method: str, name: str, value: Any) -> None:
    """Never by an error of another tree. A grant that is revoked is over, whatever the reason's text is."""
    kind, _, function = method.partition(".")
    arguments = {**METHODS[method](world), name: value}
    if kind == "Transfer":
        world.transfer = world.agent.ask(world.pool, 1, transfer_id=fresh(9), source="other")
    whose = {"Agent": world.agent, "Grant": world.grant, "Pool": world.pool, "Transfer": world.transfer}.get(kind)
    called: list[Any] = []

    def call() -> None:
        called.append(getattr(whose or getattr(kvxfer, kind), function)(**arguments))

    no_bare_error(call)
    for result in called:
        repr(result)
        if inspect.iscoroutine(result):
            result.close()
        if isinstance(result, Transfer):
            result.cancel()
    if method == "Grant.revoke":
        assert world.grant.state is GrantState.REVOKED
    if world.transfer is not None:
        world.transfer.cancel()


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        pytest.param(kind, name, value, id=f"{kind.__name__}-{name}-{value!r:.12}")
        for kind in MAKES
        for name, value in extremes_of(kind)
    ],
)
def test_a_class_of_extreme_values_is_refused_or_can_be_used(kind: type, name: str, value: Any) -> None:
    def call() -> None:
        made = kind(**{**MAKES[kind], name: value})
        repr(made)
        if isinstance(made, CompatibilityRecord):
            made.digest()

    no_bare_error(call)


class Union(ctypes.Union):
    _fields_ = (("address", ctypes.c_void_p), ("number", ctypes.c_long))


class Packed(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("address", ctypes.c_void_p), ("number", ctypes.c_char))


class Holder(ctypes.Structure):
    _fields_ = (("scale", ctypes.c_double), ("union", Union))


def released() -> memoryview:
    view = memoryview(bytearray(64))
    view.release()
    return view


OBJECTS = np.array([object()] * 8)
MEMORIES: list[tuple[Any, str]] = [
    *((memory, "pointers") for memory in (OBJECTS, memoryview(OBJECTS), memoryview(np.zeros(4, [("a", "O")])))),
    *((memory, "pointers") for memory in ((ctypes.py_object * 4)(), (ctypes.c_void_p * 4)(), (ctypes.c_char_p * 4)())),
    *((memory, "pointers") for memory in ((ctypes.c_wchar_p * 4)(), (ctypes.POINTER(ctypes.c_int) * 4)())),
    *((memory, "pointers") for memory in ((ctypes.CFUNCTYPE(None) * 4)(), (Union * 4)(), (Packed * 4)(), Holder())),
    *(
        (memory, "dense tensor")
        for memory in (
            torch.UntypedStorage(64),
            torch.TypedStorage(wrap_storage=torch.UntypedStorage(8), dtype=torch.float32, _internal=True),
        )
    ),
    (torch.eye(4).to_sparse(), "tensor"),
    (released(), "memoryview cannot be had"),
    (np.float64(3), "float64 is a value"),
    (bytearray(), "empty"),
    (bytes(8), "read-only"),
]
"""What is no memory of plain bytes that can be had, and what the refusal says."""

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
    *(("Agent.register_pool", {"memory": memory, "block_count": 1}, named) for memory, named in MEMORIES),
    *(("Agent.register", {"memory": memory}, named) for memory, named in MEMORIES),
    ("Agent.register_pool", {"memory": (1 << 70, 64)}, "memory"),
    ("Agent.register", {"memory": (4096, (1 << 64) - 4096)}, "memory of .* is no memory of a process"),
    ("Agent.allocate_pool", {"block_count": 10**30}, "block_count"),
    ("Agent.grant", {"reader": "\ud800"}, "agent id"),
    ("Transfer.reserve", {"first": -1}, "first"),
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


def shown(value: Any) -> str:
    return type(value["memory"]).__name__ if "memory" in value and isinstance(value, dict) else str(value)[:40]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(("method", "wrong", "named"), WRONG_VALUES, ids=shown)
async def test_a_value_that_cannot_be_is_named(world: World, method: str, wrong: dict[str, Any], named: str) -> None:
    kind, _, function = method.partition(".")
    before = world.state()
    if kind == "Transfer":
        world.transfer = world.agent.ask(world.pool, 1, transfer_id=fresh(9), source="other")
    whose = {"Agent": world.agent, "Grant": world.grant, "Transfer": world.transfer}[kind]
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
    pool = world.agent.allocate_pool(RECORD, block_count=1, block_bytes=1, exposure="grant")  # type: ignore[arg-type]
    assert pool.published.exposure is Exposure.GRANT


async def test_a_lane_that_is_named_by_its_value_is_that_lane() -> None:
    """Also where it does not join the two."""
    first, second = (Agent(name, token=b"t" * 64, config=AgentConfig(discovery=True)) for name in "ab")
    pool, into = (agent.allocate_pool(RECORD, block_count=4, block_bytes=16) for agent in (first, second))
    async with first, second:
        second.add_remote_agent(first.export_metadata(), "a")
        first.grant(pool, [0], transfer_id=fresh(3)).ready(1, complete=True)
        transfer = second.pull(into, [0], transfer_id=fresh(3), source="a", lanes=["memory"])  # type: ignore[list-item]
        with pytest.raises(errors.LaneUnavailableError, match="memory: the two agents do not share"):
            await transfer
        first.grant(pool, [1], transfer_id=fresh(4)).ready(1, complete=True)
        transfer = second.pull(into, [0], transfer_id=fresh(4), source="a", lanes=["stream"])  # type: ignore[list-item]
        repr(transfer)
        assert (await transfer).lane is Lane.STREAM


PLAIN: list[Any] = [
    *(np.zeros(4, kind) for kind in ("u1", "<i8", ">f4", "f2", "?", "S3", "U2", "V7", "c8", "c16", "g")),
    np.zeros(4, [("a", "i1"), ("b", "<f8"), ("c", "<i2", (2, 3)), ("d", [("e", "f4")])]),
    np.zeros(4, np.dtype([("a", "i1"), ("b", "<f8"), ("c", "u1")], align=True)),
    *(bytearray(8), array.array("d", [1]), array.array("l", [1]), mmap.mmap(-1, 4096)),
    *((ctypes.c_float * 4)(), ((ctypes.c_int * 3) * 2)(), (ctypes.c_ubyte * 4)(), ctypes.c_longdouble()),
]


@pytest.mark.parametrize("memory", PLAIN, ids=lambda memory: memoryview(memory).format)
def test_memory_of_plain_numbers_is_taken_whatever_its_format(memory: Any) -> None:
    view = memoryview(memory)
    region = region_of(view)
    assert region.length_bytes == view.nbytes
    assert region.address == np.frombuffer(memory, np.uint8).ctypes.data


def test_a_lane_that_is_none_is_refused_in_the_settings() -> None:
    for lanes in ("stream", ("streem",), (Lane.STREAM, 1)):
        with pytest.raises(errors.ConfigError, match="lanes must be a list of"):
            AgentConfig(lanes=lanes)  # type: ignore[arg-type]
