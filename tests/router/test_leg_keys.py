"""The key of a worker's legs: what carries it, what never does, and a worker that does not let the router in."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib

import pytest

from kvxfer.errors import ConfigError
from kvxfer.protocol.leg_keys import leg_key
from kvxfer.router.fleet.members import workers_of
from kvxfer.router.fleet.worker import Worker
from kvxfer.router.group.plain import from_plain, to_plain
from kvxfer.router.headers import check_passed
from kvxfer.types import Membership, Role
from tests.router.test_pass_through import AUDIO, Echo
from tests.support.fake_workers import FakeWorker, eventually, failing, router_over
from tests.support.fleet import member
from tests.support.routers import RouterProcess
from tests.support.tiny_engine import tiny_engines

SECRET = b"s" * 32
STATIC = "the-key-of-a-static-fleet"
NAME = "x-kvxfer-leg-key"


def key_file(folder: pathlib.Path) -> str:
    path = folder / "leg-keys"
    path.touch(0o600)
    path.write_text(f"{STATIC}\nthe-key-that-came-before\n")
    return str(path)


async def test_each_leg_shows_its_workers_own_key(tmp_path: pathlib.Path) -> None:
    """Whatever the client shows, and whether its credentials go on."""
    for forwards in (False, True):
        p, d = FakeWorker("p0", Role.PREFILL), FakeWorker("d0")
        async with router_over(p, d, leg_key_file=key_file(tmp_path), forward_authorization=forwards) as router:
            router.workers.update(Membership(2, (p.member, d.member)), SECRET)
            for is_stream in (False, True):
                headers = {NAME: "of-a-client-of-this-router", "authorization": "Bearer theirs"}
                answer = await router.complete(stream=is_stream, headers=headers)
                assert answer.status_code == 200
                assert NAME not in answer.headers
            shown = (await router.client.get("/v1/workers")).text
        keys = {fake.name: leg_key(SECRET, fake.member.ref).hex() for fake in (p, d)}
        for fake in (p, d):
            assert [leg.headers[NAME] for leg in fake.received] == [keys[fake.name]] * 2
        assert not [key for key in keys.values() if key in shown]


async def test_workers_without_a_key_of_the_coordinator_are_shown_that_of_the_file(tmp_path: pathlib.Path) -> None:
    d = Echo("d0")
    async with router_over(d, pass_through=(AUDIO,), leg_key_file=key_file(tmp_path)) as router:
        await router.complete()
        await router.client.get("/v1/audio/x", headers={NAME: "of-a-client-of-this-router"})
    assert [asked["headers"][NAME] for asked in d.asked] == [STATIC] * 2


async def test_without_any_nothing_is_shown() -> None:
    d = FakeWorker("d0")
    async with router_over(d) as router:
        await router.complete(headers={NAME: "of-a-client-of-this-router"})
    assert NAME not in d.received[0].headers
    with pytest.raises(ConfigError, match="not for clients to pass on"):
        check_passed([NAME])


@pytest.mark.parametrize(("status", "code"), [(401, "unauthenticated"), (403, "forbidden")])
async def test_a_worker_that_does_not_let_the_router_in_is_no_fault_of_the_client(status: int, code: str) -> None:
    d = FakeWorker("d0")
    d.failures.append(failing(status, code, retryable=False, kind="invalid_request_error"))
    async with router_over(d) as router:
        assert (await router.complete()).status_code == 200, "the next attempt shows what is new"
        d.always_fails = failing(status, code, retryable=False, kind="invalid_request_error")
        answer = await router.complete()
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == code
        assert "takes no requests of this router" in answer.json()["error"]["message"]


async def test_probes_show_it_and_the_log_does_not(tmp_path: pathlib.Path) -> None:
    async with tiny_engines(1) as [engine]:
        flags = (f"--engine={engine.url}", f"--leg-key-file={key_file(tmp_path)}", "--log-level=debug")
        router = await asyncio.to_thread(RouterProcess, *flags)
        try:
            await eventually(lambda: {"/health", "/v1/models", "/metrics"} <= set(engine.asked))
        finally:
            code, log = await asyncio.to_thread(router.stop)
        assert code == 0
        assert {headers[NAME] for headers in engine.headers} == {STATIC}
        assert STATIC not in log


def test_a_new_secret_changes_the_key_and_not_the_worker() -> None:
    view = Membership(1, (member("d"), member("d.1", port=False)))
    before, after = (workers_of(view, secret) for secret in (SECRET, b"t" * 32))
    assert [bool(worker.leg_key) for worker in before] == [True, False], "without HTTP there are no legs"
    assert before[0].leg_key != after[0].leg_key
    assert dataclasses.replace(after[0], leg_key=before[0].leg_key) == before[0]
    assert before[0].leg_key not in repr(before[0])
    assert from_plain(Worker, to_plain(before[0])) == before[0], "the other processes of a router are told"
