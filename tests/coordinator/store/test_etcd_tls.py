"""TLS to etcd: who gets in, what wrong files say, and files that change while the store is open."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kvxfer.coordinator.options import CoordinatorOptions
from kvxfer.coordinator.store import EtcdFiles, EtcdStore
from kvxfer.coordinator.store.etcd_tls import LOOK_S, EtcdProof
from kvxfer.errors import ConfigError, CoordinatorUnavailableError
from kvxfer.trust.identity import CertRole
from tests.support.coordinator import until
from tests.support.etcd import EtcdNodes, etcd_nodes, needs_etcd
from tests.support.stores import CLOCK_US, record
from tests.support.trust import ClusterAuthority

STORE = {"store": "etcd:127.0.0.1:2379"}


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> ClusterAuthority:
    return ClusterAuthority(tmp_path_factory.mktemp("etcd-certs"), "etcd")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, ca: ClusterAuthority) -> Iterator[EtcdNodes]:
    with etcd_nodes(tmp_path_factory.mktemp("etcd"), 1, ca) as started:
        yield started


@contextlib.asynccontextmanager
async def opened(nodes: EtcdNodes, files: EtcdFiles | None) -> AsyncIterator[EtcdStore]:
    store = EtcdStore(tuple(nodes.endpoints.split(",")), CLOCK_US, lease_s=2, files=files)
    await store.open("x", "x:1")
    try:
        yield store
    finally:
        await store.close()


@needs_etcd
async def test_a_certificate_of_its_ca_gets_in(nodes: EtcdNodes) -> None:
    async with opened(nodes, nodes.files("c0")) as store:
        first = await store.next_number()
        await store.put(record())
        assert await store.load() == (record(),)
        assert await store.next_number() > first


@needs_etcd
async def test_others_get_nothing(nodes: EtcdNodes, ca: ClusterAuthority, tmp_path: pathlib.Path) -> None:
    other = ClusterAuthority(tmp_path / "other", "etcd")
    stranger = other.issue(CertRole.COORDINATOR, "c0")
    cert, key = str(stranger.cert_file), str(stranger.key_file)
    own = nodes.files("c0")
    for files in (
        None,
        EtcdFiles(ca.ca_file),
        EtcdFiles(ca.ca_file, cert, key),
        EtcdFiles(other.ca_file, own.cert_file, own.key_file),
    ):
        async with opened(nodes, files) as store:
            with pytest.raises(CoordinatorUnavailableError, match=f"the store etcd:{nodes.endpoints} does not answer"):
                await store.next_number()


@needs_etcd
async def test_changed_files_are_used_without_a_restart(
    nodes: EtcdNodes, ca: ClusterAuthority, tmp_path: pathlib.Path
) -> None:
    files, stranger = nodes.files("c1"), ClusterAuthority(tmp_path / "other", "etcd").issue(CertRole.COORDINATOR, "c1")
    shown = EtcdFiles(files.ca_file, str(tmp_path / "c1.pem"), str(tmp_path / "c1.key"))
    copy(stranger.cert_file, stranger.key_file, shown)
    async with opened(nodes, shown) as store:
        with pytest.raises(CoordinatorUnavailableError):
            await store.next_number()
        copy(files.cert_file, files.key_file, shown)

        async def asked() -> int:
            while True:
                with contextlib.suppress(CoordinatorUnavailableError):
                    return await store.next_number()
                await asyncio.sleep(0.05)

        assert await asyncio.wait_for(asked(), 30.0)


@needs_etcd
@pytest.mark.deep
async def test_a_watch_goes_on_over_a_renewal(nodes: EtcdNodes) -> None:
    files = nodes.files("c2")
    seen: set[str] = set()
    wholes = 0

    async with opened(nodes, files) as store:

        async def follow() -> None:
            nonlocal wholes
            while True:
                async for change in store.watch():
                    wholes += change.is_whole
                    seen.update(found.agent_id for found in change.records)

        following = asyncio.create_task(follow())
        try:
            await until(lambda: wholes == 1, "the first view")
            nodes.files("c2")
            await until(lambda: wholes == 2, "a whole view over the new connection")
            await store.put(record("after"))
            await until(lambda: "after" in seen, "the record")
            assert not following.done(), following.result()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


def copy(cert: str | pathlib.Path, key: str | pathlib.Path, to: EtcdFiles) -> None:
    shutil.copyfile(key, to.key_file)
    shutil.copyfile(cert, to.cert_file)


def test_files_that_are_wrong_are_named(ca: ClusterAuthority, tmp_path: pathlib.Path) -> None:
    issued, other = (ca.issue(CertRole.COORDINATOR, name) for name in ("c8", "c9"))
    nothing = tmp_path / "nothing"
    nothing.write_text("no certificate")
    for files, words in (
        (EtcdFiles(str(tmp_path / "gone")), "store_ca_file: cannot use .*gone"),
        (EtcdFiles(str(nothing)), "store_ca_file: cannot use .*nothing"),
        (EtcdFiles(ca.ca_file, str(nothing)), "store_cert_file: cannot use .*nothing"),
        (EtcdFiles(ca.ca_file, str(issued.cert_file), str(tmp_path / "gone")), "store_key_file: cannot use .*gone"),
        (EtcdFiles(ca.ca_file, str(issued.cert_file), str(other.key_file)), "store_cert_file: cannot use .*c8"),
    ):
        with pytest.raises(ConfigError, match=words):
            EtcdProof(files)


def test_wrong_files_change_nothing_later(
    ca: ClusterAuthority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    issued = ca.issue(CertRole.COORDINATOR, "c7")
    proof = EtcdProof(EtcdFiles(ca.ca_file, str(issued.cert_file), str(issued.key_file)))
    now_s = time.monotonic()

    def look_later() -> int:
        nonlocal now_s
        now_s += 2 * LOOK_S
        monkeypatch.setattr(time, "monotonic", lambda: now_s)
        proof.look()
        monkeypatch.undo()
        return proof.number

    assert look_later() == 0
    ca.issue(CertRole.COORDINATOR, "c7")
    assert look_later() == 1
    issued.key_file.unlink()
    assert (look_later(), look_later()) == (1, 1)
    assert [entry.levelname for entry in caplog.records if "not taken" in entry.message] == ["WARNING"]
    ca.issue(CertRole.COORDINATOR, "c7")
    assert look_later() == 2


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**STORE, "store_cert_file": "c"}, "store_cert_file needs store_ca_file"),
        ({**STORE, "store_ca_file": "ca", "store_key_file": "k"}, "store_key_file needs store_cert_file"),
        ({"store_ca_file": "ca"}, "store_ca_file is for a store in etcd, not for 'memory'"),
    ],
)
def test_options_that_do_not_fit_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CoordinatorOptions(**values)
