"""A coordinator on a sqlite file: what it knows after a restart, and a disk that is full."""

from __future__ import annotations

import asyncio
import pathlib
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from kvxfer.errors import ConfigError, CoordinatorUnavailableError
from kvxfer.rpc import MembershipWatch
from tests.support.coordinator import Cluster, running, until


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of 512 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run(
            [mount, "-t", "tmpfs", "-o", "size=512k", "none", place], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("no file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(place: pathlib.Path) -> None:
    with (place / "filler").open("wb", buffering=0) as filler:
        try:
            while filler.write(bytes(512)):
                pass
        except OSError:
            return


def free(place: pathlib.Path) -> None:
    (place / "filler").unlink()


def status(cluster: Cluster, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{cluster.ready['http_url']}{path}", timeout=5.0) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def test_a_restart_knows_its_members_and_ends_those_that_stay_away(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, store=f"sqlite:{tmp_path}/store.db") as cluster:
        stays, goes = cluster.agent("a"), cluster.agent("b", nonce=2)
        ref, gone = await stays.session.start(), await goes.session.start()
        await until(lambda: "b" in stays.members, "a to know b")
        await cluster.stop()
        goes.cut()
        await cluster.start()
        async with MembershipWatch(cluster.address, cluster.token) as watch:
            first = await watch.wait_connected()
            assert {member.ref for member in first.members} == {ref, gone}
            await until(lambda: [m.ref for m in watch.membership.members] == [ref], "b to be over")
        await until(lambda: stays.gone == [gone], "a to hear of it, once")
        late = await cluster.agent("c", nonce=3).session.start()
        assert late.incarnation.number > gone.incarnation.number


async def test_a_store_that_can_never_be_used_ends_the_start(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, store=f"sqlite:{tmp_path}/store.db") as cluster:
        with pytest.raises(ConfigError, match="in use by another coordinator"):
            async with running(tmp_path, store=cluster.options.store):
                pass


async def test_a_full_disk_refuses_new_incarnations_only(tmp_path: pathlib.Path, small_disk: pathlib.Path) -> None:
    async with running(tmp_path, store=f"sqlite:{small_disk}/store.db", metrics_port=0) as cluster:
        agent = cluster.agent("a")
        ref = await agent.session.start()
        await until(lambda: status(cluster, "/ready") == (200, '{"status": "ok"}'), "the coordinator to be ready")
        await asyncio.to_thread(fill, small_disk)
        late = cluster.agent("b", nonce=2)
        with pytest.raises(CoordinatorUnavailableError, match=r"no new incarnations now: .* the disk is full"):
            await late.session.start(2.0)
        agent.session.set_draining()
        code, text = await asyncio.to_thread(status, cluster, "/ready")
        assert (code, "the disk is full" in text) == (503, True)
        assert "kvxfer_coordinator_store_available 0.0" in (await asyncio.to_thread(status, cluster, "/metrics"))[1]
        async with MembershipWatch(cluster.address, cluster.token) as watch:
            await until(lambda: any(m.is_draining for m in watch.membership.members), "what a says")
        assert agent.session.is_connected
        await asyncio.to_thread(free, small_disk)
        assert (await cluster.agent("c", nonce=3).session.start()).incarnation.number > ref.incarnation.number
        await until(lambda: status(cluster, "/ready")[0] == 200, "the coordinator to be ready again")
