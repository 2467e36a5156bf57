"""The Helm chart, rendered: which certificates its pods show to the coordinator, who holds the cluster token, and where
a coordinator keeps its state.
"""

from __future__ import annotations

import json

import pytest

from kvxfer import cli
from kvxfer.cli import services
from kvxfer.cli.flags import options_from
from kvxfer.coordinator.options import CoordinatorOptions
from kvxfer.errors import ForbiddenError
from kvxfer.trust import permissions
from kvxfer.trust.identity import CertIdentity
from kvxfer.trust.permissions import ControlCall, HttpPart, Subject
from kvxfer.trust.revoked import parse
from kvxfer.types import Role
from tests.support.helm.chart import MISSING, PYTHON, VARIANTS, Rendered, rendered

pytestmark = [
    pytest.mark.checkout,
    pytest.mark.deep,
    pytest.mark.skipif(not PYTHON.exists(), reason=MISSING),
]

PARTS = ("coordinator", "router", "prefill", "decode")
WITH_COORDINATOR = [name for name in VARIANTS if not name.startswith("sglang")]
TRUSTED = [name for name in VARIANTS if VARIANTS[name].get("tls", {}).get("grpc")]
MADE = [name for name in TRUSTED if "certManager" in VARIANTS[name]["tls"]["grpc"]]
every_trusted = pytest.mark.parametrize("variant", TRUSTED)
every_made = pytest.mark.parametrize("variant", MADE)
every_coordinator = pytest.mark.parametrize("variant", WITH_COORDINATOR)


def identities(variant: str) -> dict[str, CertIdentity]:
    """Of the certificates that cert-manager is asked for."""
    certificates = rendered(variant).certificates("grpc")
    return {part: CertIdentity.parse(*one["spec"]["uris"]) for part, one in certificates.items()}


def volumes(found: Rendered, component: str) -> dict[str, dict[str, object]]:
    return {one["name"]: one for one in dict(found.workloads())[component]["spec"]["volumes"]}


@every_made
def test_each_part_has_a_certificate_of_its_own_role_and_no_other(variant: str) -> None:
    found = identities(variant)
    assert set(found) == set(PARTS)
    assert {part: str(one.role) for part, one in found.items()} == {part: part for part in PARTS}
    assert len({one.cluster for one in found.values()}) == 1


@every_made
def test_a_certificate_is_made_for_what_it_is_used_for(variant: str) -> None:
    """Only a coordinator's passes for a coordinator's. Those of pools serve TLS too, where routers ask for it."""
    servers = PARTS if rendered(variant).has_worker_tls else ("coordinator",)
    host = identities(variant)["coordinator"].coordinator_host
    for part, one in rendered(variant).certificates("grpc").items():
        assert one["spec"].get("dnsNames", []) == ([host] if part == "coordinator" else [])
        assert ("server auth" in one["spec"]["usages"]) is (part in servers and part != "router")
        assert "client auth" in one["spec"]["usages"]  # coordinators watch each other


@every_made
def test_a_pools_certificate_speaks_for_its_pods_and_for_no_other_pools(variant: str) -> None:
    found = rendered(variant)
    known = identities(variant)
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        pod = f"{found.one('Deployment', role)['metadata']['name']}-7f9c5d8b6d-x2x4z"
        for agent in (found.agent_id(role, pod), f"{found.agent_id(role, pod)}.1"):
            permissions.check(known[role], ControlCall.REGISTER, Subject(agent, Role(role), has_http=True))
            with pytest.raises(ForbiddenError):
                permissions.check(known[other], ControlCall.REGISTER, Subject(agent, Role(other), has_http=True))
    for call in (ControlCall.WATCH, ControlCall.DRAIN):
        permissions.check(known["router"], call)


@every_trusted
def test_a_pod_has_its_own_secret_and_only_the_coordinators_have_the_token(variant: str) -> None:
    found = rendered(variant)
    made = found.certificates("grpc")
    named = VARIANTS[variant]["tls"]["grpc"].get("secretNames", {})
    for component in PARTS:
        held = volumes(found, component)
        secret = held["grpc-tls"]["secret"]
        wanted = made[component]["spec"]["secretName"] if made else named[component]
        assert secret == {"secretName": wanted, "defaultMode": 0o400}
        assert ("cluster-token" in json.dumps(held)) is (component == "coordinator")
    for component, _, container in found.containers():
        assert ("--token-file=" in json.dumps(container.get("args", []))) is (component == "coordinator")
        for mount in container["volumeMounts"]:
            if mount["name"] in ("grpc-tls", "revoked", "secrets"):
                assert mount["readOnly"] is True


@every_coordinator
def test_a_coordinator_is_insecure_only_without_certificates(variant: str) -> None:
    found = rendered(variant)
    [words] = [c["args"] for part, _, c in found.containers() if part == "coordinator"]
    assert ("--insecure" in words) is not found.has_grpc_tls
    assert any(word.startswith("--tls-client-ca-file=") for word in words) is found.has_grpc_tls


@every_coordinator
def test_workers_take_legs_of_routers_only_where_both_have_certificates_for_it(variant: str) -> None:
    found = rendered(variant)
    given = {}
    for component, _, container in found.containers():
        if "command" not in container and container["args"][0] in ("router", "worker"):
            words = [word.replace("$(POD_NAME)", "pod") for word in container["args"]]
            args = cli.build_parser(words[0]).parse_args(words)
            given[component] = options_from(services.options_class(args.command), args)
    router = given.pop("router")
    assert (router.worker_names == "identities") is found.has_worker_tls
    assert bool(router.worker_ca_file and router.worker_cert_file and router.worker_key_file) is found.has_worker_tls
    for worker in given.values():
        assert bool(worker.tls_cert_file and worker.tls_client_ca_file) is found.has_worker_tls
        assert worker.insecure is not found.has_worker_tls
        assert worker.leg_keys
        assert worker.revoked_file == ("/etc/kvxfer/revoked/revoked" if found.has_worker_tls else "")
    if found.has_worker_tls and found.certificates("grpc"):
        known = identities(variant)
        permissions.check_http(known["router"], HttpPart.LEG)
        for role in given:
            assert Role(role) in permissions.SERVES[known[role].role]
            with pytest.raises(ForbiddenError):
                permissions.check_http(known[role], HttpPart.LEG)


@every_trusted
def test_the_list_of_revoked_ones_is_one_that_the_coordinator_reads(variant: str) -> None:
    readers = PARTS if rendered(variant).has_worker_tls else ("coordinator",)
    held = {part: volumes(rendered(variant), part).get("revoked") for part in PARTS}
    assert {part for part, volume in held.items() if volume} == set(readers) - {"router"}
    name = held["coordinator"]["configMap"]["name"]  # type: ignore[index]
    (found,) = [one for one in rendered(variant).of("ConfigMap") if one["metadata"]["name"] == name]
    assert parse(found["data"]["revoked"]) == set(VARIANTS[variant]["tls"]["grpc"].get("revoked", []))


@every_coordinator
def test_a_coordinators_state_is_where_its_store_says(variant: str) -> None:
    found = rendered(variant)
    wanted = VARIANTS[variant].get("coordinator", {}).get("store", "memory")
    ((spec, words),) = [(pod, c["args"]) for part, pod, c in found.containers() if part == "coordinator"]
    (store,) = [word.removeprefix("--store=") for word in words if word.startswith("--store=")]
    CoordinatorOptions(store=store)
    assert store.startswith(wanted)
    claims = found.of("PersistentVolumeClaim")
    if wanted != "sqlite":
        assert not claims
        return
    (claim,) = claims
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    (container,) = spec["containers"]
    places = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    volume = places[store.removeprefix("sqlite:").rpartition("/")[0]]
    assert volumes(found, "coordinator")[volume]["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
    assert found.one("Deployment", "coordinator")["spec"]["strategy"] == {"type": "Recreate"}
