"""The compose file, read: every command, flag, port, path and variable that it names exists, and the image has it."""

from __future__ import annotations

import pathlib
import re
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kvxfer import cli
from kvxfer.cli import services
from kvxfer.cli.flags import options_from
from kvxfer.engine import model_store
from kvxfer.engine.http import WorkerHttp
from kvxfer.policy.admit import AdmitOptions
from kvxfer.router.admin import AdminAccess
from kvxfer.router.app import build_app
from kvxfer.router.auth import ApiKeys
from kvxfer.router.core import RouterCore
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.front import Door, Front
from kvxfer.router.metrics import RouterMetrics
from kvxfer.router.options import RouterOptions
from kvxfer.rpc.token import load_token
from kvxfer.serving.bodies import Bodies
from kvxfer.types import check_agent_id
from tests.support.dockerfile import stages

pytestmark = pytest.mark.checkout

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
SERVICE = stages()["service"]
SERVICES: dict[str, Any] = COMPOSE["services"]
ROLES = ("coordinator", "prefill", "decode", "router")


def parsed(service: str) -> Any:
    words = SERVICES[service]["command"]
    return cli.build_parser(words[0]).parse_args(words)


def options(service: str) -> Any:
    args = parsed(service)
    return options_from(services.options_class(args.command), args)


@pytest.mark.parametrize("service", SERVICES)
def test_command_parses(service: str) -> None:
    assert parsed(service).command == SERVICES[service]["command"][0]


@pytest.mark.parametrize("service", ROLES)
def test_options_are_accepted(service: str) -> None:
    found = options(service)
    assert found.host == "0.0.0.0"
    assert found.insecure
    assert found.token_file == "/run/secrets/cluster_token"


def test_roles() -> None:
    assert set(SERVICES) == {*ROLES, "model"}
    for role in ("prefill", "decode"):
        found = options(role)
        assert str(found.role) == role
        assert check_agent_id(found.agent_id) == role
        assert found.advertise_host == role
        assert found.model in (model_store.DEFAULT_MODEL, model_store.TINY_MODEL)
        assert found.model == SERVICES["model"]["command"][1]


def test_addresses_name_services_and_their_ports() -> None:
    for service in ("prefill", "decode", "router"):
        host, _, port = options(service).coordinator.rpartition(":")
        assert host in SERVICES
        assert int(port) == options(host).port
    assert parsed_doctor(SERVICES["coordinator"]["healthcheck"]["test"]).endswith(f":{options('coordinator').port}")


def parsed_doctor(test: list[str]) -> str:
    assert test[:2] == ["CMD", "kvxfer"]
    return str(cli.build_parser(test[2]).parse_args(test[2:]).coordinator)


def test_only_the_router_is_published_and_only_on_loopback() -> None:
    assert {name for name, service in SERVICES.items() if service.get("ports")} == {"router"}
    (published,) = SERVICES["router"]["ports"]
    host, _, inner = published.split(":")
    assert host == "127.0.0.1"
    assert int(inner) == options("router").port
    assert COMPOSE["networks"]["cluster"]["internal"] is True
    for service in ("coordinator", "prefill", "decode"):
        assert SERVICES[service]["networks"] == ["cluster"]


def test_secrets_of_read_only_containers_are_files() -> None:
    """Compose would copy any other into the container, and refuses to start one that is read-only. A file is mounted as
    it is: an owner or a mode that is said beside it would count for nothing."""
    for service in ROLES:
        assert SERVICES[service]["read_only"] is True
        for secret in SERVICES[service]["secrets"]:
            assert isinstance(secret, str)
            assert set(COMPOSE["secrets"][secret]) == {"file"}


def test_the_token_is_made_as_kvxfer_takes_it(tmp_path: pathlib.Path) -> None:
    (uid,) = re.findall(r"useradd --uid (\d+)", " ".join(SERVICE.all("RUN")))
    file = COMPOSE["secrets"]["cluster_token"]["file"].removeprefix("./")
    made = r"openssl rand -hex 32 \| sudo install -m (\d+) -o (\d+) -g (\d+) /dev/stdin deploy/(\S+)"
    ((mode, owner, group, target),) = re.findall(made, (ROOT / "deploy" / "compose.yaml").read_text())
    assert (owner, group, target) == (uid, uid, file)
    token = tmp_path / file
    token.write_text(f"{'0f' * 32}\n")
    token.chmod(int(mode, 8))
    assert load_token(token) == b"0f" * 32
    for service in ROLES:
        assert [f"/run/secrets/{secret}" for secret in SERVICES[service]["secrets"]] == [options(service).token_file]
    assert f"deploy/{file}" in (ROOT / ".gitignore").read_text().splitlines()
    assert "!deploy" not in (ROOT / ".dockerignore").read_text()


def test_a_service_is_not_killed_before_its_own_grace_is_over() -> None:
    for service in ROLES:
        found = options(service)
        own_s = found.stop_grace_s if service == "coordinator" else found.shutdown_grace_s
        given = SERVICES[service]["stop_grace_period"]
        assert re.fullmatch(r"\d+s", given)
        assert int(given[:-1]) >= own_s + 10


def test_what_compose_names_exists() -> None:
    for service in SERVICES.values():
        assert set(service["networks"]) <= set(COMPOSE["networks"])
        assert set(service.get("depends_on", ())) <= set(SERVICES)
        for mount in service.get("volumes", ()):
            volume, _, target = mount.partition(":")
            assert volume in COMPOSE["volumes"]
            assert target == SERVICE.variables()["XDG_CACHE_HOME"]
    build = SERVICES["model"]["build"]
    context = (ROOT / "deploy" / build["context"]).resolve()
    assert (context / build["dockerfile"]).is_file()
    assert {service["image"] for service in SERVICES.values()} == {"kvxfer:latest"}


def test_workers_and_router_listen_where_the_health_check_asks_whether_they_are_ready() -> None:
    (found,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", " ".join(SERVICE.all("HEALTHCHECK")))
    port, path = found
    assert path == "/ready"
    assert SERVICE.all("EXPOSE") == [port]
    for service in ("prefill", "decode", "router"):
        assert "healthcheck" not in SERVICES[service]
        assert options(service).port == int(port)


def test_the_health_checks_route_is_one_of_router_and_worker() -> None:
    workers = Workers()
    core, door = RouterCore(RouterOptions(), workers, RouterMetrics(workers)), Door(AdmitOptions())
    bodies = Bodies(RouterOptions())
    router = build_app(
        core, ApiKeys(), door, Front(core, ApiKeys(), door), AdminAccess(ApiKeys(), is_loopback=True), bodies
    )
    engine = SimpleNamespace(executor=SimpleNamespace(digests=None))
    worker = WorkerHttp(
        engine,  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        bodies=bodies,
        statistics=dict,
        render_metrics=bytes,
    )
    for app in (router, worker.app()):
        assert {"/live", "/health", "/ready"} <= {getattr(route, "path", "") for route in app.routes}
    worker.close()


def test_nothing_is_started_before_what_it_needs_is_ready() -> None:
    for service in ROLES[1:]:
        needs = SERVICES[service]["depends_on"]
        assert needs["coordinator"]["condition"] == "service_healthy"
    assert {SERVICES["router"]["depends_on"][worker]["condition"] for worker in ("prefill", "decode")} == {
        "service_healthy"
    }
