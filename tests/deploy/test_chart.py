"""The Helm chart, rendered by Helm's own engine: Kubernetes' schemas take it, and what it names exists in kvxfer.

Here is what containers run: commands, flags, paths, variables. ``test_chart_cluster.py`` has what joins them.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import re
from typing import Any

import pytest

from kvxfer import cli
from kvxfer.cli import services, settings
from kvxfer.cli.flags import options_from
from kvxfer.connectors.sglang.options import Options as SglangOptions
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.errors import ConfigError
from kvxfer.router.options import RouterOptions
from kvxfer.types import check_agent_id
from tests.support.helm import engine_flags
from tests.support.helm.chart import MISSING, PYTHON, REFUSED, VARIANTS, error_of, lint, rendered

pytestmark = [
    pytest.mark.checkout,
    pytest.mark.deep,
    pytest.mark.skipif(not PYTHON.exists(), reason=MISSING),
]

ROOT = pathlib.Path(__file__).resolve().parents[2]
POD = {"$(POD_NAME)": "test-kvxfer-prefill-7f9c5d8b6d-x2x4z", "$(POD_IP)": "10.1.2.3"}
OURS = {"HOME", "XDG_CACHE_HOME", "HF_TOKEN", "POD_NAME", "POD_IP"}
"""Variables that a container may have beside kvxfer's own and those of the drain."""
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def filled(words: list[str]) -> list[str]:
    """As Kubernetes gives them to a container."""
    text = json.dumps(words)
    for name, value in POD.items():
        text = text.replace(name, value)
    found: list[str] = json.loads(text)
    return found


def flags(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) if "=" in word else (word, "") for word in words if word.startswith("--"))


@every_variant
def test_kubernetes_takes_every_object(variant: str) -> None:
    found = rendered(variant)
    assert found.invalid == ()
    names = [(one["kind"], one["metadata"]["name"]) for one in found.objects]
    assert len(set(names)) == len(names)
    assert {one["metadata"]["namespace"] for one in found.objects} == {"space"}


def test_helm_warns_of_nothing() -> None:
    assert lint() == []


@pytest.mark.parametrize("wrong", REFUSED)
def test_wrong_values_are_refused_by_name(wrong: str) -> None:
    assert REFUSED[wrong][1] in error_of(wrong)


@every_variant
def test_what_runs_kvxfer_is_a_command_with_options_that_it_takes(variant: str) -> None:
    commands = set()
    for _, _, container in rendered(variant).containers():
        if "command" in container:
            continue
        words = filled(container["args"])
        args = cli.build_parser(words[0]).parse_args(words)
        commands.add(args.command)
        if args.command in services.SERVICES:
            found = options_from(services.options_class(args.command), args)
            assert found.host == "0.0.0.0"
            assert f"--port={container['ports'][0]['containerPort']}" in words
    wanted = {"kvxfer": {"coordinator", "router", "worker"}, "vllm": {"coordinator", "router"}, "sglang": {"router"}}
    assert commands - {"model"} == wanted[rendered(variant).engine]


@every_variant
def test_names_of_pods_are_names_of_agents(variant: str) -> None:
    found = rendered(variant)
    for role in ("prefill", "decode"):
        pod = f"{found.one('Deployment', role)['metadata']['name']}-{'f' * 10}-{'x' * 5}"
        check_agent_id(f"{found.agent_id(role, pod)}.31")


@every_variant
def test_vllm_is_given_what_it_and_the_connector_take(variant: str) -> None:
    found = rendered(variant)
    for component, _, container in found.containers():
        if container.get("command") != ["vllm", "serve"]:
            continue
        assert found.engine == "vllm"
        words = filled(container["args"])
        given = flags(words[1:])
        assert set(given) <= engine_flags.VLLM_FLAGS
        transfer = json.loads(given["--kv-transfer-config"])
        assert transfer["kv_connector"] == "KvxferConnector"
        assert transfer["kv_load_failure_policy"] == "recompute"
        options = ConnectorOptions.from_config(transfer["kv_role"], None, transfer["kv_connector_extra_config"])
        assert str(options.role) == component
        assert options.agent_id == found.agent_id(component, POD["$(POD_NAME)"])
        assert bool(options.coordinator_cert_file) is found.has_grpc_tls
        assert bool(options.token_file) is not found.has_grpc_tls
        assert options.http_url == f"http://10.1.2.3:{given['--port']}"
        assert options.agent_config(31).bind_port == options.bind_port + 31
        if component == "prefill":
            module, _, name = given["--middleware"].rpartition(".")
            assert callable(getattr(importlib.import_module(module), name))


@every_variant
def test_sglang_is_given_what_it_and_the_backend_take(variant: str) -> None:
    found = rendered(variant)
    for component, _, container in found.containers():
        if container.get("command") != ["python3", "-m", "sglang.launch_server"]:
            continue
        assert found.engine == "sglang"
        given = flags(container["args"])
        assert set(given) <= engine_flags.SGLANG_FLAGS
        assert given["--disaggregation-mode"] == component
        assert given["--disaggregation-transfer-backend"] == "kvxfer"
        variables = {one["name"]: filled([one.get("value", "")])[0] for one in container["env"]}
        options = SglangOptions.from_environment(variables)
        assert (options.host, options.advertise) == ("0.0.0.0", "10.1.2.3")
        assert options.insecure


@every_variant
def test_models_are_fetched_before_the_engine_starts(variant: str) -> None:
    values = VARIANTS[variant]
    for _, template in rendered(variant).workloads():
        for container in template["spec"].get("initContainers", ()):
            if rendered(variant).engine == "kvxfer":
                assert container["args"][0] == "model"
            else:
                assert container["command"] == engine_flags.HUB_COMMAND
    fetches = [c for _, _, c in rendered(variant).containers() if c["name"] == "fetch-model"]
    for container in fetches:  # what a request needs a limit for is refused in a container without limits
        assert set(container["resources"]) == {"requests"}
        assert set(container["resources"]["requests"]) <= {"cpu", "memory", "ephemeral-storage"}
    assert len(fetches) == (2 if values.get("model", {}).get("fetch", True) else 0)


@every_variant
def test_no_pod_gets_variables_of_services(variant: str) -> None:
    for _, template in rendered(variant).workloads():
        assert template["spec"]["enableServiceLinks"] is False


def test_a_variable_of_a_service_would_end_the_router() -> None:
    """Why ``enableServiceLinks`` is off: Kubernetes' variable for a Service ``kvxfer-router`` is one of ours."""
    with pytest.raises(ConfigError, match="KVXFER_ROUTER_PORT"):
        settings.from_environment(RouterOptions, "router", {"KVXFER_ROUTER_PORT": "tcp://10.96.0.7:80"})


@every_variant
def test_variables_are_read_by_something(variant: str) -> None:
    script = (ROOT / "deploy" / "helm" / "kvxfer" / "files" / "drain.sh").read_text()
    of_the_drain = set(re.findall(r"\$\{?(\w+)", script))
    for _, _, container in rendered(variant).containers():
        for number, one in enumerate(container["env"]):
            name = one["name"]
            before = {other["name"] for other in container["env"][:number]}
            assert set(re.findall(r"\$\((\w+)\)", one.get("value", ""))) <= before
            if name.startswith("DRAIN_"):
                assert name in of_the_drain
            elif not name.startswith("KVXFER_SGLANG_"):  # SglangOptions refuses the unknown
                assert name in OURS | engine_flags.SGLANG_VARIABLES
    if rendered(variant).engine != "sglang":
        names = {one["name"] for _, _, c in rendered(variant).containers() for one in c["env"]}
        assert {name for name in of_the_drain if name.startswith(("DRAIN_", "POD_"))} <= names


def mounted(pod: dict[str, Any], container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Volumes by the paths where they are."""
    volumes = {one["name"]: one for one in pod["volumes"]}
    return {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}


@every_variant
def test_paths_are_where_a_volume_has_them(variant: str) -> None:
    for _, pod, container in rendered(variant).containers():
        places = mounted(pod, container)
        words = json.dumps([container.get("args", ()), container["env"], container.get("lifecycle", {})])
        for path in set(re.findall(r"/etc/kvxfer/[\w./-]+", words)):
            place, _, name = path.rpartition("/")
            volume = places[place]
            if "configMap" in volume:
                maps = {one["metadata"]["name"]: one["data"] for one in rendered(variant).of("ConfigMap")}
                assert name in maps[volume["configMap"]["name"]]
            elif "items" in volume["secret"]:
                assert name in {item["path"] for item in volume["secret"]["items"]}
            else:
                assert name in ("tls.crt", "tls.key", "ca.crt")
        used = {one["name"] for c in (*pod.get("initContainers", ()), *pod["containers"]) for one in c["volumeMounts"]}
        assert used == {one["name"] for one in pod["volumes"]}


@every_variant
def test_containers_may_do_nothing_special_and_write_where_they_must(variant: str) -> None:
    for component, pod, container in rendered(variant).containers():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        places = mounted(pod, container)
        variables = {one["name"]: one.get("value", "") for one in container["env"]}
        for path in ("/tmp", variables["HOME"], variables.get("XDG_CACHE_HOME", variables["HOME"])):
            assert "emptyDir" in places[path] or "persistentVolumeClaim" in places[path]
        discovers = component == "router" and rendered(variant).engine == "sglang"
        assert pod["automountServiceAccountToken"] is discovers


@every_variant
def test_secrets_are_readable_for_our_user_alone(variant: str) -> None:
    """kvxfer refuses a token that others may read. Root owns the file; our group reads it."""
    for _, pod, _ in rendered(variant).containers():
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"] == 10001
        for volume in pod["volumes"]:
            if volume["name"] in ("secrets", "tls", "grpc-tls", "store-tls"):
                assert volume["secret"]["defaultMode"] == 0o400


@every_variant
def test_images_are_targets_of_the_dockerfile(variant: str) -> None:
    text = (ROOT / "Dockerfile").read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", text, re.MULTILINE))
    found = rendered(variant)
    for component, pod, container in found.containers():
        assert "imagePullPolicy" not in container  # Kubernetes' own pulls `latest` at each start
        image = container["image"].rpartition(":")[0].rpartition("/")[2]
        target = image.removeprefix("kvxfer").removeprefix("-") or "service"
        assert target in stages
        is_engine = component in ("prefill", "decode") and found.engine != "kvxfer"
        assert target == (found.engine if is_engine else "service")
        assert set(re.findall(r"useradd --uid (\d+)", text)) == {str(pod["securityContext"]["runAsUser"])}
