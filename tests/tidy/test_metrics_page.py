"""docs/metrics.md lists what is exported: each registry is rendered, and its names, types and labels compared."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from kvxfer import Agent, Role, WorkerInfo
from kvxfer.agent.metrics import AgentMetrics
from kvxfer.connectors.sglang.metrics import RankMetrics
from kvxfer.connectors.tier.keeper import KeeperCounts
from kvxfer.connectors.tier.service import KeeperMetrics
from kvxfer.coordinator.metrics import CoordinatorMetrics
from kvxfer.engine.executor import Counters
from kvxfer.engine.metrics import EngineMetrics
from kvxfer.engine.pool import BlockPool
from kvxfer.engine.scheduler import Scheduler, SchedulerLimits
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.metrics import RouterMetrics
from kvxfer.router.upstream import UpstreamCounters
from kvxfer.types import Lane
from tests.support.fleet import stock

pytestmark = pytest.mark.checkout

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "metrics.md"
VLLM = ROOT / "kvxfer" / "connectors" / "vllm" / "metrics.py"
OF_THE_ENGINE = {"vLLM connector": ("model_name", "engine"), "SGLang backend": ("tp_rank",)}
"""Labels that vLLM and SGLang give every metric."""

Row = tuple[str, str, tuple[str, ...]]


def agent_registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    agent = Agent(WorkerInfo("p", Role.PREFILL, "m", ""))
    pool: Any = types.SimpleNamespace(pool_id=0, blocks=1, reserved=0, granted=0, quarantined=0)
    now = dataclasses.replace(
        agent.statistics(),
        pools=(pool,),
        outcomes={"mapped": {"committed": 1}},
        bytes={Lane.MAPPED: 1},
        offers={"mapped": {"committed": 1}},
        is_coordinator_connected=True,
    )
    AgentMetrics(agent.registry, lambda: now)
    return agent.registry


def engine_registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    pool = BlockPool(4, 16)
    counters = Counters(requests={("local", "ok"): 1}, remote_failures={"peer_gone": 1})
    executor: Any = types.SimpleNamespace(
        pool=pool, scheduler=Scheduler(pool, SchedulerLimits()), counters=counters, waited_s=lambda: 0.0
    )
    metrics = EngineMetrics()
    metrics.watch(executor)
    readiness: Any = types.SimpleNamespace(reason=None)
    metrics.watch_readiness(readiness)
    return metrics.registry


def router_registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    workers = Workers()
    workers.is_connected = True
    workers.replace("flags", [stock("d")])
    monkeypatch.setattr(workers, "inflight", lambda: {("d", "decode"): 1})
    monkeypatch.setattr(workers, "connections", lambda: {"10.0.0.1:8000": UpstreamCounters()})
    for counts in (workers.counters.ejections, workers.counters.probes, workers.counters.pair_ejections):
        workers.counters.add(counts, "d", "lost")
    return RouterMetrics(workers).registry


def coordinator_registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    metrics = CoordinatorMetrics()
    metrics.certificate_ends(1.0)
    return metrics.registry


def vllm_registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """Its module, over what it takes of vLLM: base classes that keep what they are given."""
    registry = CollectorRegistry()

    @dataclasses.dataclass
    class Stats:
        data: dict[str, Any] = dataclasses.field(default_factory=dict)

    class Metrics:
        def __init__(self, config: Any, classes: dict[type, Any], labelnames: list[str], labelvalues: Any) -> None:
            self._counter_cls, self._gauge_cls, self._histogram_cls = (classes[c] for c in (Counter, Gauge, Histogram))
            self._labelnames = labelnames

    parts = {
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
            "KVConnectorStats": Stats,
            "KVConnectorPromMetrics": Metrics,
        },
        "vllm.v1.metrics.utils": {
            "create_metric_per_engine": lambda metric, values: {i: metric.labels(*v) for i, v in values.items()}
        },
    }
    for name, members in parts.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("kvxfer_metrics_of_vllm", VLLM)
    assert spec is not None
    assert spec.loader is not None
    metrics = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, metrics)
    spec.loader.exec_module(metrics)
    classes = {kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics.KvxferPromMetrics(None, classes, ["model_name", "engine"], {0: ["m", "0"]})
    return registry


def sglang_registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    registry = CollectorRegistry()
    RankMetrics({"tp_rank": "0"}, registry)
    return registry


def tier_registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    registry = CollectorRegistry()
    counts = KeeperCounts()
    counts.errors["put", "store_full"] += 1
    keeper: Any = types.SimpleNamespace(counts=counts, blocks=1, used_bytes=1, capacity_bytes=1, pinned=1)
    registry.register(KeeperMetrics(keeper))
    return registry


REGISTRIES: dict[str, Callable[[pytest.MonkeyPatch], CollectorRegistry]] = {
    "Agent": agent_registry,
    "Built-in engine": engine_registry,
    "Router": router_registry,
    "Coordinator": coordinator_registry,
    "vLLM connector": vllm_registry,
    "SGLang backend": sglang_registry,
    "Tier service": tier_registry,
}


def told(section: str) -> list[Row]:
    """The rows of the table below that heading."""
    [text] = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `([a-z:_]+)` \| (\w+) \|([^|]*)\| .+ \|$", text, re.MULTILINE)
    return [(name, kind, tuple(sorted(re.findall(r"`(\w+)`", labels)))) for name, kind, labels in rows]


def rendered(registry: CollectorRegistry, common: tuple[str, ...] = ()) -> Iterator[Row]:
    """What a scrape shows, with one series of each metric whose label values are not known before."""
    for collector in list(registry._collector_to_names):
        if isinstance(collector, MetricWrapperBase) and collector._labelnames and not collector._metrics:
            collector.labels(*collector._labelnames)
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        if family.name.endswith("_created"):
            continue
        assert family.samples, f"{family.name} has no series here, so its labels are not known"
        labels = {label for sample in family.samples for label in sample.labels} - {"le", *common}
        name = family.name + ("_total" if family.type == "counter" else "")
        yield name, family.type, tuple(sorted(labels))


@pytest.mark.parametrize("section", REGISTRIES)
def test_metrics_page_lists_what_a_registry_exports(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = REGISTRIES[section](monkeypatch)
    assert sorted(told(section)) == sorted(rendered(registry, OF_THE_ENGINE.get(section, ())))


def test_metrics_page_lists_every_metric_that_the_code_names() -> None:
    """So that a registry which is not rendered above is noticed."""
    makers = re.compile(r"_?(Counter|Gauge|Histogram|Summary|Info|Enum)(MetricFamily)?|_(counter|gauge|histogram)_cls")
    named = set()
    for path in (ROOT / "kvxfer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            maker = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = [*node.args[:1], *(word.value for word in node.keywords if word.arg == "name")]
            if makers.fullmatch(maker):
                named |= {arg.value for arg in first if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    named = {name for name in named if "kvxfer_" in name}
    listed = {name.removesuffix("_total") for section in REGISTRIES for name, _, _ in told(section)}
    assert len(named) > 40
    assert named <= listed


def test_metrics_page_lists_a_name_once() -> None:
    names = [name for section in REGISTRIES for name, _, _ in told(section)]
    assert len(set(names)) == len(names)
