"""The Helm chart, rendered with values that no other file here has: TLS to etcd, requests of devices, the page's own
examples; and values that are refused, by the bounds that kvxfer and Kubernetes have.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import subprocess
from typing import Any

import pytest
import yaml

from kvxfer import cli
from kvxfer.cli import services
from kvxfer.cli.flags import options_from
from kvxfer.engine.options import WorkerOptions
from kvxfer.errors import ConfigError
from kvxfer.router.options import RouterOptions
from tests.support.helm import render
from tests.support.helm.chart import CHART, LOADER, MISSING, PYTHON, component_of, default_values

pytestmark = [
    pytest.mark.checkout,
    pytest.mark.deep,
    pytest.mark.skipif(not PYTHON.exists(), reason=MISSING),
]

PAGE = (CHART.parents[2] / "docs" / "kubernetes.md").read_text()
ETCD = "etcd:etcd-0.etcd:2379,etcd-1.etcd:2379"
STORE_TLS = {"storeTls": {"secretName": "etcd-client"}}
_GPU = {"nvidia.com/gpu": 1, "hugepages-2Mi": "1Gi"}
DEVICES = {"requests": {**_GPU, "ephemeral-storage": "9Gi"}, "limits": _GPU}
BUDGETED = ("coordinator", "router", "prefill", "decode")


def examples() -> dict[str, Any]:
    """The page's, by their section."""
    sections = re.findall(r"^##+ (Install|Coordinators)\n(.*?)(?=^##+ )", PAGE, re.MULTILINE | re.DOTALL)
    found = {name: re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) for name, text in sections}
    return {name: yaml.safe_load(text) for name, (text,) in found.items()}


TAKEN: dict[str, dict[str, Any]] = {
    **examples(),
    "one with a store": {"coordinator": {"store": ETCD, **STORE_TLS}},
    "several": {"coordinator": {"replicas": 3, "store": ETCD, **STORE_TLS}},
    "devices": {"prefill": {"resources": DEVICES}, "decode": {"resources": {"requests": None}}},
    "pull policy": {"images": {"pullPolicy": "Always"}},
    "longest": {"router": {"shutdownGraceSeconds": 3600}, "workers": {"shutdownGraceSeconds": 3600}},
    "shortest": {"router": {"shutdownGraceSeconds": 1}, "workers": {"shutdownGraceSeconds": 0}},
    "a share": {"prefill": {"podDisruptionBudget": {"maxUnavailable": "10%"}}},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"tls to {store}": ({"coordinator": {"store": store, **STORE_TLS}}, "coordinator.storeTls.secretName")
        for store in ("memory", "sqlite")
    },
    "tls to etcd by another name": ({"coordinator": {"storeTls": {"secret": "a"}}}, "/coordinator/storeTls"),
    "router's grace": ({"router": {"shutdownGraceSeconds": 3601}}, "/router/shutdownGraceSeconds"),
    "router without grace": ({"router": {"shutdownGraceSeconds": 0}}, "/router/shutdownGraceSeconds"),
    "workers' grace": ({"workers": {"shutdownGraceSeconds": 3601}}, "/workers/shutdownGraceSeconds"),
    **{
        f"{most!r} of {part}": ({part: {"podDisruptionBudget": {"maxUnavailable": most}}}, f"/{part}/podDisruption")
        for part in BUDGETED
        for most in (0, "0%", "00%")
    },
    **{
        f"claims of {part}": ({part: {"resources": {"claims": [{"name": "gpu"}]}}}, f"/{part}/resources")
        for part in BUDGETED
    },
    "no pull policy of Kubernetes": ({"images": {"pullPolicy": "Sometimes"}}, "/images/pullPolicy"),
}
"""Values that are refused, and what the error names."""


@dataclasses.dataclass(frozen=True)
class Made:
    """What one set of values became."""

    objects: tuple[dict[str, Any], ...]

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        return {component_of(one): one for one in self.objects if one["kind"] == kind}

    def pod(self, component: str) -> dict[str, Any]:
        workload = (self.of("Deployment") | self.of("StatefulSet"))[component]
        spec: dict[str, Any] = workload["spec"]["template"]["spec"]
        return spec


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    asked = {**TAKEN, **{name: values for name, (values, _) in REFUSED.items()}}
    assert len(asked) == len(TAKEN) + len(REFUSED)
    command = [str(PYTHON), str(pathlib.Path(render.__file__)), str(CHART)]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["variants"]
    return found


def made(answers: dict[str, Any], name: str) -> Made:
    assert "error" not in answers[name], answers[name]["error"]
    assert answers[name]["invalid"] == []
    return Made(tuple(value for value in yaml.load_all(answers[name]["text"], LOADER) if value))


@pytest.mark.parametrize("name", TAKEN)
def test_kubernetes_takes_what_is_rendered(name: str, answers: dict[str, Any]) -> None:
    assert made(answers, name).objects


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_values_are_refused_by_name(name: str, answers: dict[str, Any]) -> None:
    assert REFUSED[name][1] in answers[name].get("error", "")


@pytest.mark.parametrize("name", ["one with a store", "several", "Coordinators"])
def test_coordinators_reach_etcd_over_tls(name: str, answers: dict[str, Any]) -> None:
    pod = made(answers, name).pod("coordinator")
    (container,) = pod["containers"]
    words = [word.replace("$(POD_IP)", "10.1.2.3") for word in container["args"]]
    args = cli.build_parser("coordinator").parse_args(words)
    options = options_from(services.options_class("coordinator"), args)
    files = (options.store_ca_file, options.store_cert_file, options.store_key_file)
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "store-tls"]
    assert files == tuple(f"{mount['mountPath']}/{key}" for key in ("ca.crt", "tls.crt", "tls.key"))
    assert mount["readOnly"] is True
    (volume,) = [one for one in pod["volumes"] if one["name"] == "store-tls"]
    assert volume["secret"] == {"secretName": "etcd-client", "defaultMode": 0o400}
    for other in ("router", "prefill", "decode"):
        assert "etcd-client" not in json.dumps(made(answers, name).pod(other))


def test_what_fetches_a_model_asks_for_no_device(answers: dict[str, Any]) -> None:
    found = made(answers, "devices")
    requests = {}
    for role in ("prefill", "decode"):
        (fetch,) = found.pod(role)["initContainers"]
        assert set(fetch["resources"]) == {"requests"}
        requests[role] = fetch["resources"]["requests"]
    assert requests == {"prefill": {"cpu": "2", "memory": "4Gi", "ephemeral-storage": "9Gi"}, "decode": {}}
    (engine,) = found.pod("prefill")["containers"]
    assert engine["resources"]["requests"]["nvidia.com/gpu"] == 1


def test_a_pull_policy_that_is_given_is_that_of_each_container(answers: dict[str, Any]) -> None:
    found = made(answers, "pull policy")
    for component in ("coordinator", "router", "prefill", "decode"):
        pod = found.pod(component)
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert container["imagePullPolicy"] == "Always"


@pytest.mark.parametrize("name", ["longest", "shortest"])
def test_bounds_of_graces_are_those_of_kvxfer(name: str, answers: dict[str, Any]) -> None:
    found = made(answers, name)
    for component, options in (("router", RouterOptions), ("prefill", WorkerOptions)):
        pod = found.pod(component)
        (given,) = [word for word in pod["containers"][0]["args"] if word.startswith("--shutdown-grace-s=")]
        grace_s = float(given.partition("=")[2])
        assert options(shutdown_grace_s=grace_s).shutdown_grace_s == grace_s
        assert pod["terminationGracePeriodSeconds"] > grace_s
        with pytest.raises(ConfigError, match="shutdown_grace_s"):
            options(shutdown_grace_s=grace_s + 1 if name == "longest" else grace_s - 1)


def gibibytes(quantity: str) -> int:
    (number,) = re.fullmatch(r"(\d+)Gi", quantity).groups()  # type: ignore[union-attr]
    return int(number)


def test_the_pages_pools_have_gpus_and_more_memory_than_the_defaults(answers: dict[str, Any]) -> None:
    """Helm merges maps: a limit of memory that the page does not name would be that of the small model."""
    found = made(answers, "Install")
    shared = gibibytes(default_values()["workers"]["sharedMemory"])
    for role in ("prefill", "decode"):
        (container,) = found.pod(role)["containers"]
        limits, requests = container["resources"]["limits"], container["resources"]["requests"]
        defaults = default_values()[role]["resources"]
        assert limits["nvidia.com/gpu"] == 1
        assert gibibytes(limits["memory"]) > gibibytes(defaults["limits"]["memory"]) + shared
        assert gibibytes(limits["memory"]) >= gibibytes(requests["memory"]) > gibibytes(defaults["requests"]["memory"])
        assert int(requests["cpu"]) > int(defaults["requests"]["cpu"])


def test_the_page_installs_the_images_that_it_builds(answers: dict[str, Any]) -> None:
    built = set(re.findall(r"^docker build -t (\S+)", PAGE, re.MULTILINE))
    found = made(answers, "Install")
    images = {
        container["image"]
        for component in ("coordinator", "router", "prefill", "decode")
        for container in found.pod(component)["containers"]
    }
    assert images == {"REGISTRY/kvxfer:TAG", "REGISTRY/kvxfer-vllm:TAG"}
    assert images <= built
