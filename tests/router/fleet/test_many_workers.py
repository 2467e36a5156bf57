"""Ten thousand workers at one router, from each source: they are read, beyond the bound the answer names it, and the
router serves while a long file is read."""

from __future__ import annotations

import asyncio
import os
import pathlib
import threading

import pytest

from kvxfer.errors import ConfigError, LimitExceededError
from kvxfer.router.fleet.roster import WORKERS_MAX, Roster
from kvxfer.router.fleet.sources import file as file_module
from kvxfer.router.fleet.sources.file import FileSource
from kvxfer.router.fleet.sources.flags import workers_from_flags
from kvxfer.router.fleet.sources.worker_file import read_worker_file
from kvxfer.router.fleet.worker import WorkerSource, read_worker
from kvxfer.types import Role
from tests.support.fleet import fleet

COUNTS = [pytest.param(1_000, id="1000"), pytest.param(10_000, id="10000", marks=pytest.mark.nightly)]


def url(number: int) -> str:
    return f"http://10.{number >> 16}.{number >> 8 & 255}.{number & 255}:8000"


def text_of(count: int) -> bytes:
    roles = ("prefill", "decode")
    rows = (f"- {{url: '{url(number)}', role: {roles[number % 2]}, name: w{number}}}\n" for number in range(count))
    return ("workers:\n" + "".join(rows)).encode()


@pytest.mark.parametrize("count", COUNTS)
def test_each_source_takes_them(count: int) -> None:
    from_file = read_worker_file("workers.yaml", text_of(count))
    assert len({worker.agent_id for worker in from_file}) == count
    half = [url(number) for number in range(count // 2)], [url(number) for number in range(count // 2, count)]
    from_flags = workers_from_flags(prefill=half[0], decode=half[1])
    assert [worker.member.info.role for worker in from_flags].count(Role.PREFILL) == count // 2
    roster = Roster()
    roster.replace(WorkerSource.FILE, from_file)
    before = list(roster.listed)
    roster.replace(WorkerSource.FILE, read_worker_file("workers.yaml", text_of(count)))
    assert list(roster.listed) == before, "an unchanged worker was replaced"


def test_beyond_the_bound_each_source_names_it() -> None:
    with pytest.raises(ConfigError, match=f"name {WORKERS_MAX + 1} workers, and at most {WORKERS_MAX} may be"):
        workers_from_flags(prefill=["x"] * WORKERS_MAX, engine=["y"])
    roster = Roster()
    one = read_worker(url(0), Role.DECODE, "vllm", WorkerSource.ADMIN)
    roster.listed = {number: one for number in range(WORKERS_MAX)}  # type: ignore[misc]
    other = read_worker(url(1), Role.DECODE, "vllm", WorkerSource.ADMIN)
    with pytest.raises(LimitExceededError, match=f"there are {WORKERS_MAX} workers already"):
        roster.add(other)


@pytest.mark.deep
def test_a_file_beyond_the_bound_names_it() -> None:
    with pytest.raises(ConfigError, match=rf"workers\.yaml:1: more than {WORKERS_MAX} workers"):
        read_worker_file("workers.yaml", b"workers:\n" + b"- {}\n" * (WORKERS_MAX + 1))


async def test_a_changed_file_is_read_beside_the_loop(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one takes more than a second, in which the router's requests would stand still."""
    path = tmp_path / "workers.yaml"
    write(path, 1)
    workers, _ = fleet()
    source = FileSource(str(path), workers)
    source.load()
    threads: list[int] = []

    def noted(name: str, content: bytes) -> object:
        threads.append(threading.get_ident())
        return read_worker_file(name, content)

    monkeypatch.setattr(file_module, "read_worker_file", noted)
    write(path, 300)
    ticks = 0
    polling = asyncio.create_task(source.poll())
    while not polling.done():
        ticks += 1
        await asyncio.sleep(0)
    await polling
    assert len(workers.members()) == 300
    assert threads
    assert threads[0] != threading.get_ident()
    assert ticks > 1


def write(path: pathlib.Path, count: int) -> None:
    draft = path.with_suffix(".draft")
    draft.write_bytes(text_of(count))
    os.replace(draft, path)
