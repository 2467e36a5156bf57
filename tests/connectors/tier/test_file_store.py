"""The store of files: what comes back is what went in, its bound holds, and what is wrong has a name."""

from __future__ import annotations

import errno
import os
import pathlib
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer.connectors.tier import block_file, file_store
from kvxfer.connectors.tier.block_file import HEADER_BYTES, BlockHeader
from kvxfer.connectors.tier.file_store import FileStore
from kvxfer.connectors.tier.store import BlockMove, BlockName, BlockStore, Presence
from kvxfer.errors import BlockDamagedError, BlockForeignError, BlockMissingError, ConfigError, KvxferError

ROW = 8192
FILE = HEADER_BYTES + ROW
RECORD = bytes(range(32))


def name(number: int, record: bytes = RECORD) -> BlockName:
    return BlockName(record, number.to_bytes(36, "big"))


def rows(count: int = 16) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(7)).integers(0, 256, (count, ROW), dtype=np.uint8)


def finish(act: object, moves: Sequence[BlockMove]) -> list[KvxferError | None]:
    ended, outcomes = threading.Event(), []

    def done(result: Sequence[KvxferError | None]) -> None:
        outcomes.extend(result)
        ended.set()

    act(moves, done)  # type: ignore[operator]
    assert ended.wait(30)
    return outcomes


def save(store: BlockStore, *numbers: int) -> list[KvxferError | None]:
    return finish(store.save, [BlockMove(name(number), number % 16) for number in numbers])


def load(store: BlockStore, *numbers: int) -> list[KvxferError | None]:
    return finish(store.load, [BlockMove(name(number), number % 16) for number in numbers])


def codes(outcomes: Sequence[KvxferError | None]) -> list[str]:
    return ["" if error is None else error.code for error in outcomes]


def open_store(path: pathlib.Path, memory: np.ndarray, blocks: int = 8) -> FileStore:
    store = FileStore(memory, str(path), blocks * FILE, threads=2)
    assert store.wait_scanned(30)
    return store


@pytest.fixture
def memory() -> np.ndarray:
    return rows()


@pytest.fixture
def store(tmp_path: pathlib.Path, memory: np.ndarray) -> Iterator[FileStore]:
    store = open_store(tmp_path, memory)
    yield store
    store.close()


def files(path: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path.rglob("*.kvb"))


def test_what_went_in_comes_back_also_to_the_next_owner(tmp_path: pathlib.Path, memory: np.ndarray) -> None:
    before = memory.copy()
    store = open_store(tmp_path, memory)
    assert store.find(name(1)) is Presence.ABSENT
    assert save(store, 1, 2, 3) == [None] * 3
    memory[:] = 0
    assert load(store, 2) == [None]
    store.close()
    store = open_store(tmp_path, memory)
    assert [store.find(name(number)) for number in (1, 4)] == [Presence.HERE, Presence.ABSENT]
    assert load(store, 1, 3) == [None, None]
    assert (memory[1:4] == before[1:4]).all()
    assert not memory[0].any()
    store.close()


def test_the_least_recently_used_goes_first_and_of_a_request_its_last_block(
    store: FileStore, tmp_path: pathlib.Path
) -> None:
    save(store, *range(8))
    store.use([name(number) for number in range(4)])
    store.use([name(number) for number in range(4, 8)])
    assert save(store, 8, 9) == [None, None]
    assert [number for number in range(10) if store.find(name(number)) is Presence.HERE] == [0, 1, 4, 5, 6, 7, 8, 9]
    assert len(files(tmp_path)) == 8
    assert store.figures().evictions == 2


def test_a_block_of_another_record_is_another_block(store: FileStore) -> None:
    save(store, 1)
    assert store.find(name(1, bytes(32))) is Presence.ABSENT
    (error,) = finish(store.load, [BlockMove(name(1, bytes(32)), 0)])
    assert isinstance(error, BlockMissingError)


def spoil(path: pathlib.Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "cut":
        data = data[:-1]
    elif kind == "empty":
        data.clear()
    elif kind == "grown":
        data += b"x"
    elif kind == "byte":
        data[HEADER_BYTES + 77] ^= 1
    elif kind == "header":
        data[40] ^= 1
    elif kind == "other block":
        other = BlockHeader(name(99), ROW, bytes(16)).encode()
        data[:HEADER_BYTES] = other
    elif kind == "other model":
        data[:HEADER_BYTES] = BlockHeader(name(1, bytes(32)), ROW, bytes(16)).encode()
    elif kind == "other length":
        data[:HEADER_BYTES] = BlockHeader(name(1), ROW - 1, bytes(16)).encode()
    elif kind == "no block":
        data[:] = b"hello" * 4000
    elif kind == "newer":
        data[8] = 2
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        *((kind, BlockDamagedError) for kind in ("cut", "empty", "grown", "byte", "header")),
        *((kind, BlockForeignError) for kind in ("other block", "other model", "other length", "no block", "newer")),
    ],
)
def test_a_wrong_file_is_a_named_error_once_and_then_no_block(
    store: FileStore, tmp_path: pathlib.Path, kind: str, error: type[KvxferError]
) -> None:
    save(store, 1, 2)
    spoil(next(path for path in files(tmp_path) if path.stem == name(1).key.hex()), kind)
    first, second = load(store, 1, 2)
    assert type(first) is error
    assert second is None
    assert store.find(name(1)) is Presence.ABSENT
    assert len(files(tmp_path)) == 1
    assert save(store, 1) == [None]
    assert load(store, 1) == [None]


def test_a_file_that_is_gone_is_a_named_miss(store: FileStore, tmp_path: pathlib.Path) -> None:
    save(store, 1)
    files(tmp_path)[0].unlink()
    assert isinstance(load(store, 1)[0], BlockMissingError)
    assert store.find(name(1)) is Presence.ABSENT


def test_a_full_disk_is_a_named_error_and_old_blocks_make_room(
    store: FileStore, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk holds three blocks; the store was promised eight."""
    real = os.write

    def write(file: int, body: bytes) -> int:
        is_new = os.fstat(file).st_size == 0
        if is_new and len([path for path in tmp_path.rglob("*.kvb")]) >= 3:
            raise OSError(28, "No space left on device")
        return real(file, body)

    monkeypatch.setattr(block_file.os, "write", write)
    assert [save(store, number) for number in range(3)] == [[None]] * 3
    (error,) = save(store, 3)
    assert error is not None
    assert error.code == "store_full"
    assert not list(tmp_path.rglob(".*part"))
    assert save(store, 4) == [None]
    assert [number for number in range(5) if store.find(name(number)) is Presence.HERE] == [1, 2, 4]


def test_a_disk_that_had_no_room_is_tried_again_after_a_while(
    store: FileStore, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, is_full = os.write, True

    def write(file: int, body: bytes) -> int:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, body)

    monkeypatch.setattr(file_store, "FULL_S", 0.2)
    monkeypatch.setattr(block_file.os, "write", write)
    assert codes(save(store, 1)) == ["store_full"]
    is_full = False
    end_s = time.monotonic() + 20
    while codes(save(store, *range(8))) != [""] * 8:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert load(store, *range(8)) == [None] * 8
    assert store.figures().capacity_bytes == 8 * FILE


def test_a_process_that_lacks_file_descriptors_loses_no_block(
    store: FileStore, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1)

    def refuse(*arguments: object, **more: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(block_file.os, "open", refuse)
        assert codes(load(store, 1)) == ["limit_exceeded"]
        assert codes(save(store, 2)) == ["limit_exceeded"]
    assert load(store, 1) == [None]


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.EROFS])
def test_a_file_that_cannot_be_read_is_named_and_stored_again(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    save(store, 1)

    def refuse(*arguments: object, **more: object) -> int:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patched:
        patched.setattr(block_file.os, "open", refuse)
        assert codes(load(store, 1)) == ["store_broken"]
    assert store.find(name(1)) is Presence.ABSENT
    assert save(store, 1) == [None]
    assert load(store, 1) == [None]


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_file_is_foreign_and_what_a_link_leads_to_stays(
    store: FileStore, tmp_path: pathlib.Path, kind: str
) -> None:
    save(store, 1)
    (path,) = files(tmp_path)
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    assert codes(load(store, 1)) == ["block_foreign"]
    assert codes(save(store, 1)) == (["store_broken"] if kind == "folder" else [""])
    assert (tmp_path / "elsewhere").stat().st_size == FILE


def test_a_directory_belongs_to_its_user_alone(tmp_path: pathlib.Path, memory: np.ndarray) -> None:
    open_store(tmp_path, memory).close()
    folder = tmp_path / file_store.FORMAT
    folder.chmod(0o777)
    open_store(tmp_path, memory).close()
    assert folder.stat().st_mode & 0o777 == 0o700
    if os.geteuid():
        pytest.skip("this user may not give files away")
    os.chown(folder, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        FileStore(memory, str(tmp_path), FILE)


@pytest.mark.parametrize("path", ["\0", "x" * 300, "~nobody-has-this-name/kv", "/dev/null"])
def test_a_path_that_cannot_be_a_directory_is_refused(memory: np.ndarray, path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        FileStore(memory, path, FILE)


def test_a_directory_that_cannot_be_written_is_a_named_error(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **more: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(block_file.os, "rename", refuse)
    (error,) = save(store, 1)
    assert error is not None
    assert error.code == "store_broken"
    assert store.figures().used_bytes == 0


def test_a_directory_has_one_owner(store: FileStore, tmp_path: pathlib.Path, memory: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="another process has"):
        FileStore(memory, str(tmp_path), FILE)


def test_what_is_no_block_stays_and_what_was_not_finished_goes(tmp_path: pathlib.Path, memory: np.ndarray) -> None:
    store = open_store(tmp_path, memory)
    save(store, 1)
    store.close()
    folder = files(tmp_path)[0].parent
    kept = [folder / "notes.txt", folder / "zz.kvb", tmp_path / "mine.kvb", folder / "abc.kvb"]
    for path in kept:
        path.write_text("mine")
    (folder / f".{'0' * 16}.kvb-part").write_text("half")
    (folder / "0011.kvb").symlink_to(kept[0])
    store = open_store(tmp_path, memory, blocks=1)
    save(store, 2)
    store.close()
    assert all(path.read_text() == "mine" for path in kept)
    assert not list(folder.glob(".*part"))
    assert store.figures().blocks == 1


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_bound_holds_and_no_wrong_byte_comes_back(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any saves, loads, uses and restarts, against what the rows held."""
    path, memory = tmp_path_factory.mktemp("store"), rows()
    truth = memory.copy()
    blocks = data.draw(st.integers(1, 5))
    store = open_store(path, memory, blocks)
    steps = st.tuples(st.sampled_from("slur"), st.lists(st.integers(0, 15), min_size=1, max_size=4, unique=True))
    for what, numbers in data.draw(st.lists(steps, max_size=15)):
        if what == "s":
            memory[:] = truth
            save(store, *numbers)
        elif what == "l":
            memory[:] = 0
            for number, outcome in zip(numbers, load(store, *numbers), strict=True):
                assert outcome is None or outcome.code == "block_missing"
                assert outcome is not None or (memory[number] == truth[number]).all()
        elif what == "u":
            store.use([name(number) for number in numbers])
        else:
            store.close()
            store = open_store(path, memory, blocks)
        assert sum(file.stat().st_size for file in files(path)) == store.figures().used_bytes <= blocks * FILE
    store.close()
