"""Digests of whole files: no byte escapes, each file is read once a host, and nothing stale is believed."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pathlib
import random
import stat
import threading
import time

import pytest
import xxhash

from kvxfer.connectors.common import file_digests
from kvxfer.connectors.common.checkpoint import fingerprint_of
from kvxfer.connectors.common.digest_cache import DigestCache
from kvxfer.connectors.common.file_digests import SHA256, XXH3, FileChanged, digests_of, stamps_of
from kvxfer.connectors.common.stamps import Stamp, stamp_of

MIB = 1 << 20


@pytest.fixture
def old_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One that was left alone for long, as the clock of digests goes."""
    path = tmp_path / "old"
    path.write_bytes(random.Random(1).randbytes(MIB + 17))
    now_ns = time.time_ns()
    monkeypatch.setattr(file_digests.time, "time_ns", lambda: now_ns + 10_000_000_000)
    return str(path)


def digest(path: str, cache: DigestCache, kind: str = XXH3) -> str:
    return digests_of(stamps_of([path]), kind, cache)[path]


def test_fingerprint_of_a_40_mb_checkpoint_changes_with_any_single_byte(tmp_path: pathlib.Path) -> None:
    draw, cache = random.Random(40), DigestCache(None)
    files = [tmp_path / f"model-{part}.safetensors" for part in (1, 2)]
    for file in files:
        file.write_bytes(draw.randbytes(20 * MIB))
    whole = fingerprint_of(stamps_of(map(str, files)), cache)
    seen = {whole}
    places = [0, 1, 20 * MIB - 1, MIB, MIB - 1, *(draw.randrange(20 * MIB) for _ in range(19))]
    for count, place in enumerate(places, 2):
        with draw.choice(files).open("r+b") as file:
            file.seek(place)
            was = file.read(1)[0]
            file.seek(place)
            file.write(bytes([was ^ 1 << draw.randrange(8)]))
            file.flush()
            seen.add(fingerprint_of(stamps_of(map(str, files)), cache))
            assert len(seen) == count, f"byte {place}"
            file.seek(place)
            file.write(bytes([was]))
    assert fingerprint_of(stamps_of(map(str, files)), cache) == whole


def test_digests_are_those_of_the_libraries(old_file: str) -> None:
    content = pathlib.Path(old_file).read_bytes()
    assert digest(old_file, DigestCache(None)) == xxhash.xxh3_128_hexdigest(content)
    assert digest(old_file, DigestCache(None), SHA256) != digest(old_file, DigestCache(None))


def test_a_digest_is_kept_for_other_processes_and_only_this_user_reads_it(
    old_file: str, own_cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = digest(old_file, DigestCache(own_cache))
    (entry,) = own_cache.glob("*.json")
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    assert stat.S_IMODE(own_cache.stat().st_mode) == 0o700
    monkeypatch.setattr(file_digests, "_read", None)
    assert digest(old_file, DigestCache(own_cache)) == found


def test_an_entry_is_not_believed_that_others_could_have_written(old_file: str, own_cache: pathlib.Path) -> None:
    digest(old_file, DigestCache(own_cache))
    (entry,) = own_cache.glob("*.json")
    entry.chmod(0o666)
    assert DigestCache(own_cache).get(XXH3, stamp_of(old_file)) is None


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Stamp)])
def test_an_entry_is_of_exactly_one_state_of_a_file(field: str, old_file: str, own_cache: pathlib.Path) -> None:
    cache = DigestCache(own_cache)
    digest(old_file, cache)
    stamp = stamp_of(old_file)
    assert cache.get(XXH3, stamp) is not None
    assert cache.get(SHA256, stamp) is None
    assert cache.get(XXH3, dataclasses.replace(stamp, **{field: getattr(stamp, field) - 1})) is None


def test_a_file_written_just_before_it_was_read_is_not_kept(tmp_path: pathlib.Path, own_cache: pathlib.Path) -> None:
    path = tmp_path / "young"
    path.write_bytes(b"1")
    digest(str(path), DigestCache(own_cache))
    assert list(own_cache.glob("*.json")) == []


def test_an_entry_says_when_it_was_read_and_a_young_one_is_not_believed(old_file: str, own_cache: pathlib.Path) -> None:
    digest(old_file, DigestCache(own_cache))
    (path,) = own_cache.glob("*.json")
    entry = json.loads(path.read_text())
    path.write_text(json.dumps(entry | {"read_ns": stamp_of(old_file).newest_ns + 1_999_999_999}))
    assert DigestCache(own_cache).get(XXH3, stamp_of(old_file)) is None
    path.write_text("no entry")
    assert DigestCache(own_cache).get(XXH3, stamp_of(old_file)) is None


def test_without_a_directory_digests_are_kept_in_memory(
    old_file: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    cache = DigestCache(tmp_path / "file" / "digests")
    assert cache.directory is None
    found = digest(old_file, cache)
    monkeypatch.setattr(file_digests, "_read", None)
    assert digest(old_file, cache) == found


def test_a_directory_that_others_can_write_is_not_used(tmp_path: pathlib.Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert DigestCache(tmp_path / "open").directory is None


def test_entries_of_other_boots_are_removed(old_file: str, own_cache: pathlib.Path) -> None:
    own_cache.mkdir(parents=True, mode=0o700)
    (own_cache / "deadbeef-1.json").touch()
    digest(old_file, DigestCache(own_cache))
    assert not (own_cache / "deadbeef-1.json").exists()


def test_a_file_that_changed_since_it_was_looked_at_is_told(old_file: str) -> None:
    stamps = stamps_of([old_file])
    with pathlib.Path(old_file).open("r+b") as file:
        file.write(b"2")
    os.utime(old_file)
    with pytest.raises(FileChanged, match="old was changed"):
        digests_of(stamps, XXH3, DigestCache(None))


def test_a_file_that_changes_while_it_is_read_is_told(old_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.readv

    def readv(file: int, memory: list[memoryview]) -> int:
        os.utime(old_file, ns=(1, 1))
        return read(file, memory)

    stamps = stamps_of([old_file])
    monkeypatch.setattr(os, "readv", readv)
    with pytest.raises(FileChanged, match="while it was read"):
        digests_of(stamps, XXH3, DigestCache(None))


def test_file_that_another_process_reads_is_not_read_again(
    old_file: str, own_cache: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """As the ranks of one engine do: each takes files that no other is at."""
    other = tmp_path / "other"
    other.write_bytes(b"other")
    cache, stamps = DigestCache(own_cache), stamps_of([old_file, str(other)])
    cache.put(XXH3, stamps[old_file], "", 0)  # too young: makes nothing
    lock = cache._path(cache._key(XXH3, stamps[old_file])).with_suffix(".lock")
    found: dict[str, str] = {}
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: found.update(digests_of(stamps, XXH3, cache)))
        thread.start()
        while cache.get(XXH3, stamps[str(other)]) is None:
            assert thread.is_alive()
        assert found == {}
        DigestCache(own_cache).put(XXH3, stamps[old_file], "from the other process", file_digests.time.time_ns())
    thread.join(10.0)
    assert found == {old_file: "from the other process", str(other): xxhash.xxh3_128_hexdigest(b"other")}
