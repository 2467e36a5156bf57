"""The Helm chart, rendered: what joins its pods. Names, ports and probes that exist, who may reach whom, how pods end,
and by which numbers pools grow.
"""

from __future__ import annotations

import json
import pathlib
import re
import shlex
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from kvxfer.config import check_addresses
from kvxfer.coordinator.metrics import CoordinatorMetrics, MetricsServer
from kvxfer.engine.http import WorkerHttp
from kvxfer.policy.admit import AdmitOptions
from kvxfer.router.admin import AdminAccess
from kvxfer.router.app import build_app
from kvxfer.router.auth import ApiKeys
from kvxfer.router.core import RouterCore
from kvxfer.router.fleet.sources.endpoint_slices import workers_of_slices
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.front import Door, Front
from kvxfer.router.metrics import RouterMetrics
from kvxfer.router.options import RouterOptions
from kvxfer.serving.bodies import Bodies
from tests.support.helm import engine_flags
from tests.support.helm.chart import CHART, MISSING, PYTHON, VARIANTS, Rendered, component_of, rendered
from tests.support.kubernetes import endpoint, endpoint_slice

pytestmark = [
    pytest.mark.checkout,
    pytest.mark.deep,
    pytest.mark.skipif(not PYTHON.exists(), reason=MISSING),
]

ROOT = pathlib.Path(__file__).resolve().parents[2]
every_variant = pytest.mark.parametrize("variant", VARIANTS)
WAITING = {
    "kvxfer": "kvxfer_engine_waiting_tokens",
    "vllm": engine_flags.VLLM_WAITING,
    "sglang": engine_flags.SGLANG_WAITING,
}


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def pods(found: Rendered) -> dict[str, dict[str, Any]]:
    return dict(found.workloads())


def ports_of(template: dict[str, Any]) -> dict[str, int]:
    return {one["name"]: one["containerPort"] for one in template["spec"]["containers"][0]["ports"]}


def words_of(template: dict[str, Any]) -> list[str]:
    words: list[str] = template["spec"]["containers"][0]["args"]
    return words


def flag(words: list[str], name: str) -> str:
    (found,) = [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
    return found


@pytest.fixture(scope="module")
def routes() -> dict[str, set[str]]:
    """Of the router and of the built-in worker."""
    workers = Workers()
    core, door = RouterCore(RouterOptions(), workers, RouterMetrics(workers)), Door(AdmitOptions())
    front, bodies = Front(core, ApiKeys(), door), Bodies(RouterOptions())
    router = build_app(core, ApiKeys(), door, front, AdminAccess(ApiKeys(), is_loopback=True), bodies)
    engine: Any = SimpleNamespace(executor=SimpleNamespace(digests=None))
    nothing: Any = SimpleNamespace()
    worker = WorkerHttp(engine, nothing, nothing, bodies=bodies, statistics=dict, render_metrics=bytes)
    found = {
        name: {getattr(route, "path", "") for route in app.routes}
        for name, app in (("router", router), ("kvxfer", worker.app()))
    }
    worker.close()
    served = MetricsServer(CoordinatorMetrics(), "127.0.0.1", 0)
    asked = {path: httpx.get(f"http://127.0.0.1:{served.port}{path}", trust_env=False) for path in ("/live", "/ready")}
    found["coordinator"] = {path for path, answer in asked.items() if answer.json() == {"status": "ok"}}
    served.close()
    return {**found, "vllm": {engine_flags.HEALTH}, "sglang": {engine_flags.HEALTH}}


def is_ours(found: Rendered, component: str) -> bool:
    return component in ("router", "coordinator") or found.engine == "kvxfer"


def probe_port(found: Rendered, component: str) -> str:
    """Only engines that are not ours are asked where they serve clients."""
    if not is_ours(found, component):
        return "http"
    return "metrics" if component == "coordinator" else "probe"


@every_variant
def test_probes_ask_what_is_there(variant: str, routes: dict[str, set[str]]) -> None:
    found = rendered(variant)
    for component, template in pods(found).items():
        container = template["spec"]["containers"][0]
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]
            asked = probe["httpGet"]
            assert asked["path"] in routes[component if component in ("router", "coordinator") else found.engine]
            assert asked["port"] in ports_of(template)
            assert asked["port"] == probe_port(found, component)
            assert "scheme" not in asked
        if is_ours(found, component):
            own = {"--probe-port": "probe", "--metrics-port": "metrics"}
            for name, port in own.items() if component != "coordinator" else ():
                assert flag(words_of(template), name) == str(ports_of(template)[port])
            assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
            assert container["livenessProbe"]["httpGet"]["path"] == "/live"


@every_variant
def test_services_name_ports_of_the_pods_that_they_select(variant: str) -> None:
    found = rendered(variant)
    for service in found.of("Service"):
        selected = [t for t in pods(found).values() if selects(service["spec"]["selector"], t["metadata"]["labels"])]
        (template,) = selected
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports_of(template))
    for workload in found.of("Deployment", "StatefulSet"):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert selects(workload["spec"]["selector"]["matchLabels"], labels)


@every_variant
def test_everyone_asks_the_coordinators_at_their_services(variant: str) -> None:
    found = rendered(variant)
    asked = set(re.findall(r'(?:--coordinator=|\\"coordinator\\":\\")([^"\\]+)', json.dumps(found.objects)))
    if found.engine == "sglang":
        assert not asked
        return
    service = found.one("Service", "coordinator")
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    names = [s for s in found.of("Service") if component_of(s) == "coordinators"]
    if "replicas" in VARIANTS[variant].get("coordinator", {}):
        whole = found.one("StatefulSet", "coordinator")
        assert [one["metadata"]["name"] for one in names] == [whole["spec"]["serviceName"]]
        name, domain = whole["metadata"]["name"], f"{whole['spec']['serviceName']}.space.svc"
        pods_asked = [f"{name}-{i}.{domain}:{ports['grpc']}" for i in range(whole["spec"]["replicas"])]
        assert asked == {",".join(pods_asked)}
    else:
        assert not names
        assert asked == {f"{service['metadata']['name']}:{ports['grpc']}"}
    for one in (service, *names):  # a coordinator that is not ready still serves those that it knows
        assert one["spec"]["publishNotReadyAddresses"] is True
    for text in asked:
        check_addresses("coordinator", text)
    own = words_of(pods(found)["coordinator"])
    assert flag(own, "--port") == str(ports["grpc"])
    assert flag(own, "--metrics-port") == str(ports["metrics"])


@every_variant
def test_the_router_finds_workers_by_the_labels_of_their_services(variant: str) -> None:
    found = rendered(variant)
    for role in ("prefill", "decode"):
        service = found.one("Service", role)
        labels = service["metadata"]["labels"]
        slices = [endpoint_slice("s", None, endpoint("10.1.2.3", f"{role}-0"), labels=labels)]
        (worker,), reasons = workers_of_slices(slices, dialect="vllm")
        assert not reasons
        assert (worker.agent_id, str(worker.member.info.role)) == (f"{role}-0", role)
        assert worker.dialect == {"vllm": "vllm-kvxfer"}.get(found.engine, found.engine)
        if found.engine == "sglang":
            selector = flag(words_of(pods(found)["router"]), "--kubernetes-selector")
            equal, present = selector.split(",")
            assert selects(dict([equal.split("=")]), labels)
            assert present in labels
            port = ports_of(pods(found)[role])["bootstrap"]
            assert f"--disaggregation-bootstrap-port={port}" in words_of(pods(found)[role])
            assert labels["kvxfer.io/bootstrap-port"] == str(port)


@every_variant
def test_the_router_may_read_slices_and_nothing_else(variant: str) -> None:
    found = rendered(variant)
    if found.engine != "sglang":
        assert not found.of("Role", "RoleBinding", "ServiceAccount")
        return
    page = (ROOT / "docs" / "discovery.md").read_text()
    (text,) = re.findall(r"```yaml\n(apiVersion: rbac.*?)```", page, re.DOTALL)
    assert found.one("Role", "router")["rules"] == yaml.safe_load(text)["rules"]
    name = found.one("ServiceAccount", "router")["metadata"]["name"]
    assert pods(found)["router"]["spec"]["serviceAccountName"] == name
    binding = found.one("RoleBinding", "router")
    assert [one["name"] for one in binding["subjects"]] == [name]
    assert binding["roleRef"]["name"] == found.one("Role", "router")["metadata"]["name"]


def may_reach(found: Rendered, source: dict[str, str], component: str, port: int) -> bool:
    """Whether a pod of this release with the labels ``source`` may open a connection to ``port`` of a component."""
    labels = pods(found)[component]["metadata"]["labels"]
    policies = [p for p in found.of("NetworkPolicy") if selects(p["spec"]["podSelector"]["matchLabels"], labels)]
    if not policies:
        return True
    for rule in (rule for policy in policies for rule in policy["spec"]["ingress"]):
        ports = rule.get("ports")
        in_ports = ports is None or any(one["port"] <= port <= one.get("endPort", one["port"]) for one in ports)
        peers = rule.get("from")
        in_peers = peers is None or any(
            "namespaceSelector" not in peer and selects(peer["podSelector"]["matchLabels"], source) for peer in peers
        )
        if in_ports and in_peers:
            return True
    return False


def may_be_scraped(found: Rendered, component: str, port: int) -> bool:
    """Whether Prometheus' namespace may open a connection to that port."""
    labels = pods(found)[component]["metadata"]["labels"]
    policies = [p for p in found.of("NetworkPolicy") if selects(p["spec"]["podSelector"]["matchLabels"], labels)]
    return any(
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}} in rule.get("from", [])
        and port in [one["port"] for one in rule["ports"]]
        for rule in (rule for policy in policies for rule in policy["spec"]["ingress"])
    )


@every_variant
def test_who_may_reach_whom(variant: str) -> None:
    found = rendered(variant)
    labels = {component: template["metadata"]["labels"] for component, template in pods(found).items()}
    outsider = {"app.kubernetes.io/name": "other"}
    http = ports_of(pods(found)["prefill"])["http"]
    router = ports_of(pods(found)["router"])["http"]
    is_open = not VARIANTS[variant].get("networkPolicy", {}).get("enabled", True)
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        assert may_reach(found, labels["router"], role, http)
        if found.engine == "sglang":  # its agents and sockets take free ports
            assert may_reach(found, labels[other], role, 40000)
        else:
            data = ports_of(pods(found)[role])["data"]
            assert may_reach(found, labels[other], role, data)
            assert may_reach(found, labels[other], role, data + 31)
            assert may_reach(found, labels[other], role, http) is is_open
        assert may_reach(found, outsider, role, http) is is_open
        assert may_reach(found, labels[role], "router", router)
    for component, template in pods(found).items():
        for port in (port for name, port in ports_of(template).items() if name in ("probe", "metrics")):
            assert all(may_reach(found, one, component, port) is is_open for one in (*labels.values(), outsider))
    if found.engine != "sglang":
        grpc = ports_of(pods(found)["coordinator"])["grpc"]
        assert all(may_reach(found, labels[one], "coordinator", grpc) for one in ("router", "prefill", "decode"))
        assert may_reach(found, outsider, "coordinator", grpc) is is_open
        is_several = "replicas" in VARIANTS[variant].get("coordinator", {})
        assert may_reach(found, labels["coordinator"], "coordinator", grpc) is (is_open or is_several)
    clients = VARIANTS[variant].get("networkPolicy", {}).get("clientsFrom")
    assert may_reach(found, outsider, "router", router) is (clients is None)


@every_variant
def test_budgets_are_of_pods(variant: str) -> None:
    found = rendered(variant)
    budgets = found.of("PodDisruptionBudget")
    is_on = VARIANTS[variant].get("prefill", {}).get("podDisruptionBudget", {}).get("enabled", True)
    wanted = {"router", "prefill", "decode"} if is_on else set()
    if "replicas" in VARIANTS[variant].get("coordinator", {}):
        wanted.add("coordinator")
    assert {component_of(one) for one in budgets} == wanted
    for one in budgets:
        labels = pods(found)[component_of(one)]["metadata"]["labels"]
        assert selects(one["spec"]["selector"]["matchLabels"], labels)
        # Unready routers and workers take nothing; all coordinators are unready at once while etcd is away, and serve.
        wanted_policy = "IfHealthyBudget" if component_of(one) == "coordinator" else "AlwaysAllow"
        assert one["spec"]["unhealthyPodEvictionPolicy"] == wanted_policy


@every_variant
def test_a_pod_has_the_time_that_its_end_takes(variant: str) -> None:
    found = rendered(variant)
    for component, template in pods(found).items():
        spec, container = template["spec"], template["spec"]["containers"][0]
        if component == "coordinator":
            continue
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        variables = {one["name"]: one.get("value", "") for one in container["env"]}
        if component == "router":
            first, then = int(command[1]), float(flag(container["args"], "--shutdown-grace-s"))
            assert then == 300  # a rollout cuts no stream that a worker's drain would wait for
        elif found.engine == "sglang":  # SIGTERM waits for what runs, without a bound
            first, then = int(command[1]), 0.0
        else:
            name = {"kvxfer": "--shutdown-grace-s", "vllm": "--shutdown-timeout"}[found.engine]
            first, then = int(variables["DRAIN_SECONDS"]), float(flag(container["args"], name))
        assert spec["terminationGracePeriodSeconds"] >= first + then + 10


@every_variant
def test_workers_drain_at_each_router_by_its_name(variant: str) -> None:
    found = rendered(variant)
    if found.engine == "sglang":
        return
    routers = found.one("StatefulSet", "router")
    (names,) = [s for s in found.of("Service") if s["metadata"]["name"] == routers["spec"]["serviceName"]]
    assert names["spec"]["publishNotReadyAddresses"] is True
    scaler = [one for one in found.of("HorizontalPodAutoscaler") if component_of(one) == "router"]
    count = scaler[0]["spec"]["maxReplicas"] if scaler else routers["spec"]["replicas"]
    assert ("replicas" in routers["spec"]) is not bool(scaler)
    scheme = "http" if "--insecure" in words_of(pods(found)["router"]) else "https"
    port = ports_of(pods(found)["router"])["http"]
    domain = f"{names['metadata']['name']}.space.svc"
    urls = [f"{scheme}://{routers['metadata']['name']}-{i}.{domain}:{port}" for i in range(count)]
    for role in ("prefill", "decode"):
        container = pods(found)[role]["spec"]["containers"][0]
        variables = {one["name"]: one.get("value", "") for one in container["env"]}
        assert shlex.split(variables["DRAIN_ROUTERS"]) == urls
        assert variables["DRAIN_AGENT"] == found.agent_id(role, "$(POD_NAME)")
        port = ports_of(pods(found)[role])[probe_port(found, role)]
        path = container["livenessProbe"]["httpGet"]["path"]
        assert variables["DRAIN_LIVE_URL"] == f"http://127.0.0.1:{port}{path}"
    for certificate in found.certificates("tls").values():
        assert f"*.{domain}" in certificate["spec"]["dnsNames"]
        tls = [one for one in pods(found)["router"]["spec"]["volumes"] if one["name"] == "tls"]
        assert tls[0]["secret"]["secretName"] == certificate["spec"]["secretName"]


@every_variant
def test_pools_grow_by_a_number_that_exists(variant: str) -> None:
    found = rendered(variant)
    if "autoscaling" not in VARIANTS[variant].get("prefill", {}):
        assert not found.of("HorizontalPodAutoscaler", "ScaledObject")
        return
    (keda,), hpa = found.of("ScaledObject"), found.one("HorizontalPodAutoscaler", "decode")
    for one in (keda, hpa):
        target = one["spec"]["scaleTargetRef"]
        (pool,) = [w for w in found.of("Deployment") if w["metadata"]["name"] == target["name"]]
        assert "replicas" not in pool["spec"]
    metric = WAITING[found.engine]
    assert hpa["spec"]["metrics"][0]["pods"]["metric"]["name"] == metric
    name = found.one("Deployment", "prefill")["metadata"]["name"]
    query = keda["spec"]["triggers"][0]["metadata"]["query"]
    assert query == f'sum({metric}{{namespace="space",pod=~"{name}-.+"}})'
    if found.engine == "kvxfer":  # tests/tidy compares that page with what is exported
        assert f"`{metric}`" in (ROOT / "docs" / "metrics.md").read_text()


@every_variant
def test_prometheus_scrapes_ports_of_services(variant: str) -> None:
    found = rendered(variant)
    monitors = found.of("ServiceMonitor")
    is_on = "serviceMonitor" in VARIANTS[variant]
    assert {component_of(one) for one in monitors} == (set(pods(found)) if is_on else set())
    for one in monitors:
        wanted = one["spec"]["selector"]["matchLabels"]
        (service,) = [s for s in found.of("Service") if selects(wanted, s["metadata"]["labels"])]
        (scraped,) = one["spec"]["endpoints"]
        assert selects(service["spec"]["selector"], pods(found)[component_of(one)]["metadata"]["labels"])
        (port,) = [port for port in service["spec"]["ports"] if port["name"] == scraped["port"]]
        assert port["targetPort"] == ("metrics" if is_ours(found, component_of(one)) else "http")
        assert not scraped.keys() & {"scheme", "tlsConfig"}
        assert may_be_scraped(found, component_of(one), ports_of(pods(found)[component_of(one)])[port["targetPort"]])
    for rule in found.of("PrometheusRule"):
        assert rule["spec"] == yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text())


def test_the_schema_knows_every_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def paths(part: dict[str, Any], at: str = "") -> set[str]:
        part = schema["definitions"]["pool"] if "$ref" in part else part
        inner = part.get("properties")
        if inner is None or part.get("additionalProperties") is not False:
            return {at}
        return {path for name, one in inner.items() for path in paths(one, f"{at}.{name}")}

    def given(values: Any, known: set[str], at: str = "") -> set[str]:
        if at in known or not isinstance(values, dict):
            return {at}
        return {path for name, value in values.items() for path in given(value, known, f"{at}.{name}")}

    known = paths(schema)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    optional = {".global"} | {path for path in known if path.endswith(("resources.limits", "resources.requests"))}
    assert given(values, known) | optional == known | optional
