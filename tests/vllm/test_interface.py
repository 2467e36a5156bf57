"""Our class against the base class of the installed vLLM: every method fits, whatever the version."""

from __future__ import annotations

import json
import subprocess

from engines import PYTHON

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
    if list(inspect.signature(ours).parameters) != list(inspect.signature(their).parameters):
        differ.append(f"{name}{inspect.signature(ours)}, not {inspect.signature(their)}")
print(json.dumps({
    "abstract": sorted(KvxferConnector.__abstractmethods__),
    "differ": differ,
    "unknown": unknown,
    "registered": KVConnectorFactory._registry["KvxferConnector"]() is KvxferConnector,
}))
"""
NEWER = {"get_transfer_results", "get_loaded_kv_cache_group_ids"}
"""Methods that the oldest supported version does not have."""


def test_every_method_fits_the_installed_version() -> None:
    done = subprocess.run([str(PYTHON), "-c", LOOK], capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["abstract"] == []
    assert found["differ"] == []
    assert set(found["unknown"]) <= NEWER | {"worker_half"}
    assert found["registered"]
