"""Our class against the base class of the installed vLLM: every method fits, whatever the version."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.support.vllm.engines import PYTHON

LOOK = """
import inspect, json
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.plugins import load_general_plugins
from kvxfer.connectors.vllm import KvxferConnector

load_general_plugins()
load_general_plugins()
theirs = {**vars(base.SupportsHMA), **vars(base.KVConnectorBase_V1)}
differ, unknown = [], []
for name, value in vars(KvxferConnector).items():
    if name.startswith("_"):
        continue
    if name not in theirs:
        unknown.append(name)
        continue
    owner = base.KVConnectorBase_V1 if hasattr(base.KVConnectorBase_V1, name) else base.SupportsHMA
    ours, their = getattr(KvxferConnector, name), getattr(owner, name)
    if isinstance(ours, property) or isinstance(their, property):
        if not (isinstance(ours, property) and isinstance(their, property)):
            differ.append(f"{name} is a property of one of them only")
        continue
    if list(inspect.signature(ours).parameters) != list(inspect.signature(their).parameters):
        differ.append(f"{name}{inspect.signature(ours)}, not {inspect.signature(their)}")
print(json.dumps({
    "abstract": sorted(KvxferConnector.__abstractmethods__),
    "differ": differ,
    "unknown": unknown,
    "registered": KVConnectorFactory._registry["KvxferConnector"]() is KvxferConnector,
}))
"""
STEP = """
import contextlib, json
from types import SimpleNamespace
from unittest import mock
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin
from kvxfer.connectors.vllm.connector import KvxferConnector, KvxferMetadata
from kvxfer.connectors.vllm.steps import StepOrders
from kvxfer.connectors.vllm.worker import Results

told = []
connector = KvxferConnector.__new__(KvxferConnector)
connector._worker_half = mock.Mock(
    step_saved=lambda: told.append("saved"), step_failed=lambda: told.append("failed"), results=Results,
    reports=tuple, take_expired=int,
)
mixin.get_kv_transfer_group, mixin.get_forward_context = lambda: connector, lambda: None
step = SimpleNamespace(
    kv_connector_metadata=KvxferMetadata(StepOrders()), has_sync_kv_loads=False, finished_req_ids=set()
)

def forward(error=None):
    with contextlib.suppress(ZeroDivisionError), mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(step):
        if error:
            raise error

forward()
forward(ZeroDivisionError())
try:
    raise KeyError
except KeyError:
    forward()
    forward(ZeroDivisionError())
print(json.dumps(told))
"""
WATCH = """
import json
from types import SimpleNamespace
import vllm.v1.engine.core as core
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase
from kvxfer.connectors.vllm import watch

watch.watch_worker(SimpleNamespace())
wrapped = {
    "worker": WorkerBase.__init__, "rpc": core.EngineCore.collective_rpc,
    "adapter": WorkerLoRAManager._load_adapter, "files": DefaultModelLoader._prepare_weights,
}
print(json.dumps({
    "wrapped": sorted(name for name, function in wrapped.items() if getattr(function, watch._MARK, False)),
    "weights": [name for name in dir(Worker) if "weight" in name and not name.startswith("_")],
    "has": [name for name in ("load_model", "sleep", "reload_weights") if callable(getattr(Worker, name, None))],
    "known": list(watch.CHANGING),
}))
"""
KEEPS_WEIGHTS = {
    *("compute_weight_checksums", "finish_weight_update", "get_weight_metadata", "init_weight_transfer_engine"),
    *("shutdown_weight_transfer_engine", "supports_draft_weight_updates", "weight_transfer_engine"),
}
"""Of a worker: it begins no change of weights."""
NEWER = {"get_transfer_results", "get_loaded_kv_cache_group_ids", "supports_sleep_mode"}
"""Methods that the oldest supported version does not have; the last one 0.32 neither."""


def test_every_method_fits_the_installed_version() -> None:
    found = run(LOOK)
    assert found["abstract"] == []
    assert found["differ"] == []
    assert set(found["unknown"]) <= NEWER | {"worker_half"}
    assert found["registered"]


def test_methods_that_change_weights_in_the_installed_version_are_watched() -> None:
    found = run(WATCH)
    assert found["wrapped"] == ["adapter", "files", "rpc", "worker"]
    assert found["has"] == ["load_model", "sleep", "reload_weights"]
    assert set(found["weights"]) - set(found["known"]) <= KEEPS_WEIGHTS


def test_a_forward_that_raised_is_told_from_one_that_did_not() -> None:
    assert run(STEP) == ["saved", "failed", "saved", "failed"]


def run(program: str) -> Any:
    done = subprocess.run([str(PYTHON), "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
