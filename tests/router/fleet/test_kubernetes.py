"""Following EndpointSlices at a fake API server: lists, watches, and every way in which they end."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvxfer.errors import ConfigError
from kvxfer.policy.backoff import Backoff
from kvxfer.router.fleet.sources import kubernetes
from kvxfer.router.fleet.sources.kubernetes import KubernetesOptions, KubernetesSource
from kvxfer.router.fleet.workers import Workers
from tests.support.fleet import fleet
from tests.support.kubernetes import FakeKubernetes, endpoint, endpoint_slice, fake_kubernetes
from tests.support.upstream import until


@contextlib.asynccontextmanager
async def following(fake: FakeKubernetes, **options: Any) -> AsyncIterator[tuple[Workers, KubernetesSource]]:
    workers, _ = fleet()
    settings = KubernetesOptions(api=fake.url, namespace="ns", **options).completed({})
    async with KubernetesSource(settings, workers, backoff=Backoff(base_s=0.02, cap_s=0.1)) as source:
        yield workers, source


def listed(workers: Workers) -> list[str]:
    return [member.ref.agent_id for member in workers.members()]


def decoder(number: int) -> dict[str, Any]:
    return endpoint_slice(f"slice-{number}", "decode", endpoint(f"10.0.0.{number}", f"d{number}"))


async def test_slices_are_listed_in_pages_and_then_watched() -> None:
    async with fake_kubernetes() as fake:
        for number in range(5):
            await fake.put(decoder(number))
        async with following(fake, selector="kvxfer.io/role in (prefill, decode)") as (workers, source):
            await until(lambda: fake.watches)
            assert listed(workers) == ["d0", "d1", "d2", "d3", "d4"]
            assert [query.get("continue") for query, _ in fake.requests[:3]] == [None, "2", "4"]
            assert fake.watches[0]["resourceVersion"] == str(fake.version)
            assert fake.watches[0]["allowWatchBookmarks"] == "true"
            assert {query["labelSelector"] for query, _ in fake.requests} == {"kvxfer.io/role in (prefill, decode)"}
            before = {member.ref.agent_id: member.ref for member in workers.members()}
            await fake.put(decoder(5))
            await until(lambda: "d5" in listed(workers))
            await fake.delete("slice-0")
            await until(lambda: "d0" not in listed(workers))
            await fake.put(endpoint_slice("slice-1", "decode", endpoint("10.0.0.1", "d1", conditions={"ready": False})))
            await until(lambda: listed(workers) == ["d2", "d3", "d4", "d5"])
            assert all(member.ref == before.get(member.ref.agent_id, member.ref) for member in workers.members())
            assert (source.is_connected, source.last_error, source.lists, fake.lists) == (True, "", 1, 1)


async def test_slices_watch_that_ends_goes_on_from_the_last_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "WATCH_MIN_S", 0.01)
    async with fake_kubernetes() as fake, following(fake) as (workers, source):
        await until(lambda: fake.watches)
        await fake.put(decoder(1))
        await until(lambda: listed(workers) == ["d1"])
        await fake.bookmark()
        await asyncio.sleep(0.05)
        await fake.end_watches()
        await until(lambda: len(fake.watches) == 2)
        assert fake.watches[1]["resourceVersion"] == str(fake.version)
        await fake.put(decoder(2))
        await until(lambda: listed(workers) == ["d1", "d2"])
        assert (fake.lists, source.last_error) == (1, "")


@pytest.mark.parametrize("way", ["status", "event"])
async def test_slices_version_that_is_too_old_is_listed_anew(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "WATCH_MIN_S", 0.01)
    async with fake_kubernetes() as fake, following(fake) as (workers, source):
        await fake.put(decoder(1))
        await until(lambda: listed(workers) == ["d1"])
        if way == "event":
            gone = {"kind": "Status", "code": 410, "message": "too old"}
            await fake.say({"type": "ERROR", "object": gone})
        else:
            fake.slices["slice-2"] = decoder(2)  # of which no event tells
            fake.version += 100
            fake.oldest = fake.version
            await fake.end_watches()
        await until(lambda: fake.lists == 2)
        if way == "status":
            await until(lambda: listed(workers) == ["d1", "d2"])
        await fake.put(decoder(3))
        await until(lambda: "d3" in listed(workers))
        assert source.last_error == ""


async def test_slices_server_that_is_away_leaves_the_last_list() -> None:
    async with fake_kubernetes() as fake, following(fake) as (workers, source):
        await fake.put(decoder(1))
        await until(lambda: listed(workers) == ["d1"])
        fake.status = 503
        fake.cut()
        await until(lambda: "503" in source.last_error)
        assert not source.is_connected
        assert "scripted" in source.last_error
        assert listed(workers) == ["d1"]
        fake.status = 0
        await until(lambda: source.is_connected)
        await fake.put(decoder(2))
        await until(lambda: listed(workers) == ["d1", "d2"])


async def test_slices_token_is_read_each_time(tmp_path: pathlib.Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    workers, _ = fleet()
    async with fake_kubernetes() as fake:
        fake.token = "new"
        await fake.put(decoder(1))
        options = KubernetesOptions(api=fake.url, namespace="ns", token_file=str(token))
        source = KubernetesSource(options, workers, backoff=Backoff(base_s=0.02, cap_s=0.1))
        async with source:
            await until(lambda: "401" in source.last_error)
            token.write_text("new")
            await until(lambda: listed(workers) == ["d1"])


async def test_slices_answers_that_are_no_protocol_are_an_error_and_not_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kubernetes, "LINE_BYTES_MAX", 2000)
    async with fake_kubernetes() as fake, following(fake) as (workers, source):
        await until(lambda: fake.watches)
        errors = []
        for value in ({"type": "ADDED", "object": {"metadata": {"name": "x" * 9000}}}, [1]):
            await fake.say(value)
            await until(lambda: source.last_error)
            errors.append(source.last_error)
            await until(lambda: source.is_connected)
        assert errors == [
            "an event of the watch has more than 2000 bytes",
            "the API server answered JSON that is no object",
        ]
        await fake.put(decoder(1))
        await until(lambda: listed(workers) == ["d1"])


def test_kubernetes_options_are_completed_by_what_a_pod_is_given(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST is not set"):
        KubernetesOptions().completed({}, tmp_path)
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    with pytest.raises(ConfigError, match="kubernetes_namespace"):
        KubernetesOptions().completed(environ, tmp_path)
    (tmp_path / "namespace").write_text("prod\n")
    found = KubernetesOptions().completed(environ, tmp_path)
    assert (found.api, found.namespace) == ("https://[fd00::1]:6443", "prod")
    assert (found.token_file, found.ca_file) == (str(tmp_path / "token"), str(tmp_path / "ca.crt"))
    with pytest.raises(ConfigError, match=r"the CA of Kubernetes, .*ca.crt"):
        KubernetesSource(found, fleet()[0])
    with pytest.raises(ConfigError, match="kubernetes_api must be http"):
        KubernetesOptions(api="h:1", namespace="n").completed({})
    with pytest.raises(ConfigError, match="must be https"):
        KubernetesOptions(api="http://h:1", namespace="n", token_file="t").completed({})
    with pytest.raises(ConfigError, match="the token"):
        KubernetesSource(
            KubernetesOptions(api="http://h:1", namespace="n", token_file=str(tmp_path / "no")), fleet()[0]
        )
    for wrong in ({"selector": ""}, {"selector": "a\nb"}, {"dialect": "tgi"}):
        with pytest.raises(ConfigError):
            KubernetesOptions(**wrong)
