"""The chart, rendered for many values by Helm's engine in an environment of its own; and its objects, by kind and name.

Decides which values are rendered. What an object must be is for the tests.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import hashlib
import json
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "kvxfer"
PYTHON = ROOT / "build" / "deploy-venv" / "bin" / "python"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Of the C library where PyYAML has it: ten times as fast."""
MISSING = "build/deploy-venv is not there: `make test-chart` makes it"

_POLICIES: dict[str, Any] = {
    "networkPolicy": {"clientsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "apps"}}}]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
}
_BARE: dict[str, Any] = {
    "networkPolicy": {"enabled": False},
    **{name: {"podDisruptionBudget": {"enabled": False}} for name in ("router", "prefill", "decode")},
    "model": {"fetch": False, "name": "/var/lib/kvxfer/cache/model"},
}
_CERTIFICATE: dict[str, Any] = {
    "tls": {"router": {"enabled": True, "certManager": {"enabled": True, "issuer": "ours", "dnsNames": ["llm.test"]}}}
}
_GRPC_TLS: dict[str, Any] = {
    "cluster": "one",
    "enabled": True,
    "certManager": {"enabled": True, "issuer": "ours", "issuerKind": "Issuer"},
    "revoked": ["kvxfer://one/prefill/prefill", "ab" * 32],
}
_TLS_OF_WORKERS: dict[str, Any] = {"tls": {"grpc": _GRPC_TLS, "workers": {"enabled": True}}}
_TRUSTED: dict[str, Any] = {
    "tls": {**_CERTIFICATE["tls"], "grpc": _GRPC_TLS},
    "coordinator": {"replicas": 3, "store": "etcd:etcd-0.etcd:2379,etcd-1.etcd:2379"},
}
_NAMED_SECRETS = {name: f"our-{name}" for name in ("coordinator", "router", "prefill", "decode")}
_OWN_TRUST: dict[str, Any] = {
    "fullnameOverride": "a-name-that-is-much-too-long-for-what-it-names",
    "tls": {"grpc": {"enabled": True, "secretNames": _NAMED_SECRETS}},
    "coordinator": {"store": "sqlite"},
}
_SCALED: dict[str, Any] = {
    "router": {"autoscaling": {"enabled": True, "maxReplicas": 5}},
    "prefill": {"autoscaling": {"enabled": True, "kind": "keda"}},
    "decode": {"autoscaling": {"enabled": True, "kind": "hpa", "perReplica": 2}},
}
_OTHER: dict[str, Any] = {
    "fullnameOverride": "a-name-that-is-much-too-long-for-what-it-names",
    "images": {"pullSecrets": ["registry"], "service": {"repository": "example.test/kvxfer", "tag": "1"}},
    "secrets": {"name": "ours", "clusterToken": "a", "adminKey": "b", "apiKeys": "c"},
    "model": {"servedName": "ours", "cache": {"existingClaim": "models"}, "hubToken": {"secret": "hub"}},
    "coordinator": {"port": 7401, "metricsPort": 9401, "extraArgs": ["--members-max=100"]},
    "router": {
        **{"port": 8443, "probePort": 8082, "metricsPort": 9402},
        **{"processes": 4, "replicas": 3, "extraArgs": ["--local-prefill=off"]},
    },
    "workers": {"port": 8100, "probePort": 8083, "metricsPort": 9403, "dataPort": 7600, "bootstrapPort": 8999},
}
_POOL: dict[str, Any] = {
    "podAnnotations": {"a.test/b": "c"},
    "nodeSelector": {"gpu": "yes"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "resources": {"limits": {"nvidia.com/gpu": 1}},
}

VARIANTS: dict[str, dict[str, Any]] = {"defaults": {}}
for _engine in ("kvxfer", "vllm", "sglang"):
    _kind = {"engine": _engine}
    VARIANTS |= {
        _engine: _kind,
        f"{_engine}-bare": {**_kind, **_BARE},
        f"{_engine}-watched": {**_kind, **_POLICIES},
        f"{_engine}-certificate": {**_kind, **_CERTIFICATE, **_POLICIES},
        f"{_engine}-secret": {**_kind, "tls": {"router": {"enabled": True, "secretName": "router"}}},
        f"{_engine}-scaled": {**_kind, **_SCALED},
        f"{_engine}-other": {**_kind, **_OTHER, "prefill": _POOL, "decode": _POOL},
    }
    if _engine != "sglang":
        VARIANTS |= {
            f"{_engine}-trusted": {**_kind, **_TRUSTED, **_POLICIES},
            f"{_engine}-own-trust": {**_kind, **_OWN_TRUST},
        }

VARIANTS |= {
    "kvxfer-private": {**_TLS_OF_WORKERS, **_POLICIES},
    "kvxfer-own-private": {"tls": {"grpc": _OWN_TRUST["tls"]["grpc"], "workers": {"enabled": True}}},
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "replicas": ({"router": {"replicas": "two"}}, "/router/replicas"),
    "engine": ({"engine": "trt"}, "/engine"),
    "port": ({"workers": {"port": 70000}}, "/workers/port"),
    "unknown": ({"prefill": {"replica": 2}}, "replica"),
    "unknown at the top": ({"routers": {}}, "routers"),
    "quantity": ({"workers": {"sharedMemory": "8 GB"}}, "/workers/sharedMemory"),
    "no secret": ({"secrets": {"name": ""}}, "/secrets/name"),
    "tls of gRPC without secrets": ({"tls": {"grpc": {"enabled": True}}}, "tls.grpc.secretNames.coordinator"),
    "tls of gRPC without a cluster": ({"tls": {"grpc": {**_GRPC_TLS, "cluster": ""}}}, "tls.grpc.cluster"),
    "tls of gRPC without an issuer": (
        {"tls": {"grpc": {**_GRPC_TLS, "certManager": {"enabled": True}}}},
        "tls.grpc.certManager.issuer",
    ),
    "no tls of gRPC": ({"tls": {"grpc": {**_GRPC_TLS, "enabled": False}}}, "tls.grpc.enabled"),
    "none to revoke": ({"tls": {"grpc": {"revoked": ["ab" * 32]}}}, "tls.grpc.revoked"),
    "a wrong revoked one": ({"tls": {"grpc": {**_GRPC_TLS, "revoked": ["p0"]}}}, "/tls/grpc/revoked"),
    "a wrong cluster": ({"tls": {"grpc": {**_GRPC_TLS, "cluster": "One"}}}, "/tls/grpc/cluster"),
    "tls of gRPC without a coordinator": ({"engine": "sglang", "tls": {"grpc": _GRPC_TLS}}, "engine sglang"),
    "coordinators without a store": ({"coordinator": {"replicas": 2}}, "coordinator.store"),
    "coordinators on one disk": ({"coordinator": {"replicas": 2, "store": "sqlite"}}, "coordinator.store"),
    "a wrong store": ({"coordinator": {"store": "redis:a:1"}}, "/coordinator/store"),
    "tls of workers alone": ({"tls": {"workers": {"enabled": True}}}, "tls.workers.enabled: tls.grpc.enabled"),
    "tls of vLLM": ({"engine": "vllm", **_TLS_OF_WORKERS}, "tls.workers.enabled: the HTTP port of engine vllm"),
    "tls of SGLang": ({"engine": "sglang", "tls": {"workers": {"enabled": True}}}, "port of engine sglang"),
    "tls without a secret": ({"tls": {"router": {"enabled": True}}}, "tls.router.secretName"),
    "no issuer": ({"tls": {"router": {"enabled": True, "certManager": {"enabled": True}}}}, "certManager.issuer"),
    "no tls": ({"tls": {"router": {"certManager": {"enabled": True, "issuer": "a"}}}}, "tls.router.enabled"),
}
"""Values that are refused, and what the error names."""


@dataclasses.dataclass(frozen=True)
class Rendered:
    """What one variant became. ``invalid``: what Kubernetes' schemas refuse."""

    name: str
    objects: tuple[dict[str, Any], ...]
    invalid: tuple[str, ...]

    @property
    def engine(self) -> str:
        return str(VARIANTS[self.name].get("engine", "kvxfer"))

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [value for value in self.objects if value["kind"] in kinds]

    def one(self, kind: str, component: str) -> dict[str, Any]:
        """The only object of that kind and component."""
        (found,) = [value for value in self.of(kind) if component_of(value) == component]
        return found

    def workloads(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Components, and what their pods are made from."""
        for value in self.of("Deployment", "StatefulSet"):
            yield component_of(value), value["spec"]["template"]

    def certificates(self, what: str) -> dict[str, dict[str, Any]]:
        """By component, those whose secrets end so: ``tls`` of HTTP, ``grpc`` of calls to the coordinator."""
        found = [one for one in self.of("Certificate") if one["spec"]["secretName"].endswith(f"-{what}")]
        return {component_of(one): one for one in found}

    @property
    def has_grpc_tls(self) -> bool:
        return bool(VARIANTS[self.name].get("tls", {}).get("grpc"))

    @property
    def has_worker_tls(self) -> bool:
        return bool(VARIANTS[self.name].get("tls", {}).get("workers"))

    def agent_id(self, role: str, pod: str) -> str:
        """Of a pod of that pool."""
        return f"{role}.{pod}" if self.has_grpc_tls else pod

    def containers(self) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        """(component, pod, container), those that come first included."""
        for component, template in self.workloads():
            for container in (*template["spec"].get("initContainers", ()), *template["spec"]["containers"]):
                yield component, template["spec"], container


def component_of(value: dict[str, Any]) -> str:
    return str(value["metadata"]["labels"]["app.kubernetes.io/component"])


@functools.cache
def _answers() -> dict[str, Any]:
    """Rendered once for the same chart, values and script, whatever number of processes asks: the answer is kept beside
    the environment that rendered it."""
    asked = json.dumps({**VARIANTS, **{f"refused: {name}": values for name, (values, _) in REFUSED.items()}})
    script = pathlib.Path(__file__).with_name("render.py")
    sources = [script, *sorted(path for path in CHART.rglob("*") if path.is_file())]
    digest = hashlib.sha256(asked.encode())
    for path in sources:
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    kept = PYTHON.parents[1] / "rendered.json"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if kept.exists():
            known: dict[str, Any] = json.loads(kept.read_text())
            if known["digest"] == digest.hexdigest():
                return known
        command = [str(PYTHON), str(script), str(CHART)]
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        answers: dict[str, Any] = {**json.loads(done.stdout), "digest": digest.hexdigest()}
        kept.write_text(json.dumps(answers))
        return answers


def lint() -> list[str]:
    """What ``helm lint --strict`` warns of."""
    return list(_answers()["lint"])


@functools.cache
def rendered(name: str) -> Rendered:
    answer = _answers()["variants"][name]
    assert "error" not in answer, answer["error"]
    objects = tuple(value for value in yaml.load_all(answer["text"], LOADER) if value)
    return Rendered(name, objects, tuple(answer["invalid"]))


def error_of(name: str) -> str:
    """What a refused variant is told; empty where it is rendered."""
    return str(_answers()["variants"][f"refused: {name}"].get("error", ""))


@functools.cache
def default_values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return found
