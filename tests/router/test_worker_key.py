"""The API key of the workers: what carries it, what never does, and the file that it is in."""

from __future__ import annotations

import asyncio
import pathlib

import pytest

from kvxfer import observe
from kvxfer.errors import ConfigError
from kvxfer.router import worker_key
from kvxfer.router.auth import ApiKeys
from kvxfer.router.worker_key import WorkerKey
from kvxfer.types import Role
from tests.router.test_pass_through import AUDIO, Echo
from tests.support.fake_workers import FakeWorker, eventually, router_over
from tests.support.routers import RouterProcess
from tests.support.tiny_engine import tiny_engines

KEY = "engine-secret-1"


def written(folder: pathlib.Path, text: str = f"{KEY}\n") -> str:
    path = folder / "worker-key"
    path.write_text(text)
    return str(path)


async def test_both_legs_show_the_routers_key_and_not_the_clients(tmp_path: pathlib.Path) -> None:
    p, d = FakeWorker("p0", Role.PREFILL), FakeWorker("d0")
    async with router_over(p, d, keys=ApiKeys(("client-key",)), worker_api_key_file=written(tmp_path)) as router:
        for is_stream in (False, True):
            headers = {"authorization": "Bearer client-key"}
            assert (await router.complete(stream=is_stream, headers=headers)).status_code == 200
    shown = [leg.headers["authorization"] for fake in (p, d) for leg in fake.received]
    assert shown == [f"Bearer {KEY}"] * 4


async def test_what_passes_through_shows_it_too(tmp_path: pathlib.Path) -> None:
    d = Echo("d0")
    async with router_over(d, pass_through=(AUDIO,), worker_api_key_file=written(tmp_path)) as router:
        await router.client.get("/v1/audio/x", headers={"authorization": "Bearer client-key"})
    assert d.asked[0]["headers"]["authorization"] == f"Bearer {KEY}"


async def test_where_clients_credentials_go_on_the_routers_key_stays_here(tmp_path: pathlib.Path) -> None:
    d = FakeWorker("d0")
    async with router_over(d, forward_authorization=True, worker_api_key_file=written(tmp_path)) as router:
        await router.complete(headers={"authorization": "Bearer theirs"})
        await router.complete()
    assert [leg.headers.get("authorization") for leg in d.received] == ["Bearer theirs", None]


async def test_a_changed_file_is_read_again_and_a_wrong_one_changes_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_key, "POLL_S", 0.02)
    d = FakeWorker("d0")
    path = written(tmp_path)
    async with router_over(d, worker_api_key_file=path) as router:

        async def shown() -> str:
            await router.complete()
            return d.received[-1].headers["authorization"]

        async def is_other() -> bool:
            return await shown() == "Bearer engine-secret-2"

        assert await shown() == f"Bearer {KEY}"
        written(tmp_path, "# the next one\n\n  engine-secret-2  \n")
        await eventually(is_other)
        written(tmp_path, "two\nkeys\n")
        await asyncio.sleep(0.1)
        assert await is_other()


async def test_probes_of_a_started_router_show_it_and_its_log_does_not(tmp_path: pathlib.Path) -> None:
    async with tiny_engines(1) as [engine]:
        flags = (f"--engine={engine.url}", f"--worker-api-key-file={written(tmp_path)}", "--log-level=debug")
        router = await asyncio.to_thread(RouterProcess, *flags)
        try:
            await eventually(lambda: {"/health", "/v1/models", "/metrics", "/server_info"} <= set(engine.asked))
        finally:
            code, log = await asyncio.to_thread(router.stop)
        assert code == 0
        assert {headers["authorization"] for headers in engine.headers} == {f"bearer {KEY}"}
        assert KEY not in log


@pytest.mark.parametrize(
    "text", ["", "# only\n", "one\ntwo\n", "two words\n", "k\x7f\n", "é\n", "k" * 1025, "k\n" * 9999]
)
def test_a_file_that_is_wrong_is_refused_without_its_words(text: str, tmp_path: pathlib.Path) -> None:
    key = WorkerKey()
    with pytest.raises(ConfigError, match="one API key") as caught:
        key.load(written(tmp_path, text))
    assert "two" not in str(caught.value)
    assert key.headers == ()


def test_a_missing_file_is_named_and_a_key_is_hidden(tmp_path: pathlib.Path) -> None:
    key = WorkerKey()
    with pytest.raises(ConfigError, match="/nowhere: No such file"):
        key.load("/nowhere")
    key.load(written(tmp_path))
    assert KEY not in repr(key)
    assert KEY not in observe.redact(f"a {KEY} b")
