"""The sqlite store's own: its file, and one sentence for each trouble with it."""

from __future__ import annotations

import pathlib
import sqlite3
import stat

import pytest

from kvxfer.coordinator.store import SqliteStore, make_store
from kvxfer.errors import ConfigError, CoordinatorUnavailableError
from tests.support.stores import CLOCK_US, record, sqlite_kind


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "store.db"


def mode_of(path: pathlib.Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def bytes_in(path: pathlib.Path) -> bytes:
    return path.read_bytes()


def put_bytes(path: pathlib.Path, raw: bytes) -> None:
    path.write_bytes(raw)


async def refusal(path: pathlib.Path) -> str:
    with pytest.raises(ConfigError) as caught:
        await SqliteStore(path, CLOCK_US).open("y", "y:1")
    return str(caught.value)


async def test_the_file_is_private(path: pathlib.Path) -> None:
    async with sqlite_kind(path).opened():
        assert mode_of(path) == 0o600


async def test_a_second_coordinator_is_refused_and_the_first_goes_on(path: pathlib.Path) -> None:
    async with sqlite_kind(path).opened() as store:
        assert (
            await refusal(path) == f"the store sqlite:{path} is in use by another coordinator: a sqlite store has one"
        )
        await store.put(record())
        assert await store.load() == (record(),)


@pytest.mark.parametrize("raw", [b"no database at all, but text" * 100, b"SQLite format 3\0" + bytes(5000)])
async def test_what_is_no_database_is_refused(path: pathlib.Path, raw: bytes) -> None:
    put_bytes(path, raw)
    assert "is damaged or no database" in await refusal(path)
    assert bytes_in(path) == raw


async def test_a_damaged_file_is_refused(path: pathlib.Path) -> None:
    async with sqlite_kind(path).opened() as store:
        for number in range(200):
            await store.put(record(f"agent-{number}"))
    raw = bytearray(bytes_in(path))
    raw[4096 * 2 : 4096 * 6] = b"\xa5" * (4096 * 4)
    put_bytes(path, raw)
    assert "move it away to begin without members" in await refusal(path)


async def test_another_programs_database_is_refused_and_left_alone(path: pathlib.Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE theirs (x)")
    other.close()
    assert await refusal(path) == f"the store sqlite:{path} is a database of another program"


@pytest.mark.parametrize("name", [":memory:", "./:memory:", ":x", "file:x?mode=memory", "file:/x"])
def test_a_store_in_memory_is_not_taken_for_a_file(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="store must name a file after sqlite:"):
        make_store(f"sqlite:{name}", CLOCK_US, lease_s=1.0)
    assert not list(tmp_path.iterdir())


async def test_a_folder_that_is_not_there_is_said(tmp_path: pathlib.Path) -> None:
    assert "cannot be opened: No such file or directory" in await refusal(tmp_path / "no" / "store.db")


async def test_a_full_disk_refuses_writes_and_is_tried_again(path: pathlib.Path) -> None:
    async with sqlite_kind(path).opened() as store:
        assert isinstance(store, SqliteStore)
        await store._run(lambda connection: connection.execute("PRAGMA max_page_count=1"))

        async def fill() -> None:
            for number in range(1000):
                await store.put(record(f"agent-{number}"))

        with pytest.raises(CoordinatorUnavailableError) as caught:
            await fill()
        assert str(caught.value) == f"the store sqlite:{path} cannot be written: the disk is full"
        await store.admit_number(CLOCK_US + 77)
        await store._run(lambda connection: connection.execute("PRAGMA max_page_count=100000"))
        await store.put(record("late"))
        assert "late" in {found.agent_id for found in await store.load()}


async def test_a_record_that_nobody_can_read_is_left_out(path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    async with sqlite_kind(path).opened() as store:
        assert isinstance(store, SqliteStore)
        await store.put(record())
        await store.put(record("b"))
        await store._run(lambda db: db.execute("UPDATE members SET record = x'ffff' WHERE agent_id = 'b'"))
        assert await store.load() == (record(),)
    assert "member 'b' is left out" in caplog.text
