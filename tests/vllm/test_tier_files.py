"""A tier of files in real vLLM: files that are wrong in every way, a directory that another engine has, and a disk that
is really full. What cannot be read is computed, by name, and the tokens are those of the first, computed answer."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.vllm.tiered import ALL, FILE, WHOLE, Driven, Within, files

pytestmark = [pytest.mark.nightly]
DISK_FILES = 20
"""So many blocks fit on the small disk."""


@pytest.fixture
def ended(tmp_path: pathlib.Path) -> Iterator[list[Driven]]:
    engines: list[Driven] = []
    yield engines
    for engine in engines:
        engine.end()


def _replace(path: pathlib.Path, make: Callable[[], object]) -> None:
    path.unlink()
    make()


def spoil(paths: list[pathlib.Path], others: list[pathlib.Path], elsewhere: pathlib.Path) -> dict[str, int]:
    """Each of a prompt's nine files is wrong in another way; returns the codes. ``others``: files of another prompt;
    ``elsewhere``: a file that one of them becomes a link to."""
    data = [path.read_bytes() for path in paths]
    kept = [path.read_bytes() for path in others]
    elsewhere.write_bytes(data[2])
    paths[0].write_bytes(kept[0])  # another block, whole, with a checksum that is right
    paths[1].write_bytes(data[0])  # the same prompt's first block, as its second
    _replace(paths[2], lambda: paths[2].symlink_to(elsewhere))  # to the right bytes
    _replace(paths[3], paths[3].mkdir)
    _replace(paths[4], lambda: os.mkfifo(paths[4]))
    paths[5].write_bytes(data[5][:-1])
    paths[6].write_bytes(data[6] + b"\x00")
    paths[7].write_bytes(data[7][:4096] + kept[7][4096:])  # this block's header, another's bytes
    paths[8].unlink()
    return {"load block_foreign": 5, "load block_damaged": 3, "load block_missing": 1}


def test_files_that_are_wrong_in_every_way_and_a_second_engine(
    ended: list[Driven], tmp_path: pathlib.Path, tiny_model: pathlib.Path
) -> None:
    store = {"store": "file", "path": str(tmp_path / "kv"), "capacity_bytes": 64 * FILE, "threads": 1}
    engine = Driven(tiny_model, store, tmp_path / "engine.log").wait_ready()
    ended.append(engine)
    first = engine.tokens([1])
    mine = files(tmp_path / "kv")
    first += engine.tokens([2])
    others = [path for path in files(tmp_path / "kv") if path not in mine]
    first += engine.tokens([3, 4])
    assert len(mine) == len(others) == WHOLE
    codes = spoil(mine, others, tmp_path / "elsewhere")
    assert engine.generate(1) == (first[0], 0)
    assert {name: count for name, count in engine.errors().items() if name.startswith("load")} == codes
    assert (tmp_path / "elsewhere").exists()
    assert engine.tokens([2, 3, 4]) == first[1:]
    mine[3].rmdir()  # a directory is nothing that the store removes
    assert engine.tokens([1, 2, 3, 4]) == first
    assert engine.generate(1) == (first[0], ALL)

    second = Driven(tiny_model, store, tmp_path / "second.log")
    ended.append(second)
    assert "another process has the tier's directory" in second.refusal()
    assert engine.generate(2) == (first[1], ALL)


def test_a_disk_that_is_full_and_has_room_again(
    ended: list[Driven], tmp_path: pathlib.Path, tiny_model: pathlib.Path
) -> None:
    """A file system of 20 blocks in a mount namespace that only the engine has; the store was promised 64."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f'mount -t tmpfs -o size={DISK_FILES * FILE + 65536} none {disk} && exec "$@"'
    inside = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if os.geteuid() or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount")
    store = {"store": "file", "path": str(disk), "capacity_bytes": 64 * FILE}
    engine = Driven(tiny_model, store, tmp_path / "engine.log", inside=inside).wait_ready()
    ended.append(engine)
    seen = pathlib.Path(f"/proc/{engine.process.pid}/root{disk}")  # the disk, from here
    first = engine.tokens([1, 2, 3, 4])
    assert engine.errors()["save store_full"] > 0
    assert 0 < len(files(seen)) <= DISK_FILES
    assert engine.tokens([1, 2, 3, 4]) == first
    assert comes_back(engine, first)  # old blocks make room for new ones

    for path in files(seen):
        path.unlink()
    ballast = seen / "ballast"
    free = os.statvfs(seen)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
    before = engine.errors()["save store_full"]
    assert engine.tokens([1, 2, 3, 4]) == first
    assert engine.generate(1) == (first[0], 0)
    assert engine.errors()["save store_full"] > before
    assert not files(seen)
    ballast.unlink()
    assert comes_back(engine, first)


def comes_back(engine: Any, first: list[list[int]]) -> bool:
    """Within a while, a whole prompt does; the tokens are right all the time."""
    with Within(60):
        while True:
            assert engine.tokens([1, 2, 3]) == first[:3]
            for seed in (2, 1):
                tokens, cached = engine.generate(seed)
                assert tokens == first[seed - 1]
                if cached == ALL:
                    return True
