"""Each fault that a sqlite store can have, at the start and while it is used: one sentence that names the file and says
what to do, never an error from below; and no number that was given before is given again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import pathlib
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import pytest

from kvxfer.coordinator.store import SqliteStore
from kvxfer.coordinator.store.sqlite import APPLICATION_ID
from kvxfer.errors import ConfigError, CoordinatorUnavailableError
from tests.support.stores import record

START_US = 1_700_000_000_000_000
LATER_US = START_US + 1_000_000
MEMBERS = 60
PAGE = 4096
ADVICE = ("move it away to begin without members", "let it, or name another place", "a sqlite store has one")
"""What a refusal tells the operator to do."""


@pytest.fixture(scope="module")
def place() -> Iterator[pathlib.Path]:
    """In memory where that can be: what is waited for here is no disk."""
    memory = pathlib.Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield pathlib.Path(directory)


@dataclasses.dataclass
class Kept:
    """A store that a coordinator used and left, as a copy that each test damages."""

    directory: pathlib.Path
    highest: int
    """The last number that was given."""

    def copy_to(self, place: pathlib.Path) -> pathlib.Path:
        shutil.copytree(self.directory, place)
        return place / "store.db"


@pytest.fixture(scope="module")
def kept(place: pathlib.Path) -> Kept:
    """Taken while it is open, as of a coordinator that was killed: what was written last is in the WAL."""
    used, left = place / "used", place / "left"
    used.mkdir()

    async def use() -> int:
        store = SqliteStore(used / "store.db", START_US)
        await store.open("x", "x:1")
        number = 0
        for one in range(MEMBERS):
            number = await store.next_number()
            await store.put(record(f"agent-{one}", number))
        shutil.copytree(used, left)
        await store.close()
        return number

    return Kept(left, asyncio.run(use()))


Damage = Callable[[pathlib.Path, random.Random], None]


def flip_bits(path: pathlib.Path, chance: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 8, 200))):
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    path.write_bytes(raw)


def overwrite_part(path: pathlib.Path, chance: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    at, size = chance.randrange(len(raw)), chance.randrange(1, 2 * PAGE)
    raw[at : at + size] = chance.randbytes(len(raw[at : at + size]))
    path.write_bytes(raw)


def zero_pages(path: pathlib.Path, chance: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    at = chance.randrange(max(1, len(raw) // PAGE)) * PAGE
    raw[at : at + PAGE] = bytes(len(raw[at : at + PAGE]))
    path.write_bytes(raw)


def truncate(path: pathlib.Path, chance: random.Random) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: chance.randrange(len(raw))])


def swap_pages(path: pathlib.Path, chance: random.Random) -> None:
    raw = path.read_bytes()
    pages = [raw[at : at + PAGE] for at in range(0, len(raw), PAGE)]
    chance.shuffle(pages)
    path.write_bytes(b"".join(pages))


def not_a_database(path: pathlib.Path, chance: random.Random) -> None:
    wal_missing(path, chance)  # it may have every page
    path.write_bytes(chance.randbytes(chance.randrange(1, 3 * PAGE)))


def wal_of(damage: Damage) -> Damage:
    def damaged(path: pathlib.Path, chance: random.Random) -> None:
        damage(path.with_name("store.db-wal"), chance)

    damaged.__name__ = f"wal_{damage.__name__}"
    return damaged


def wal_missing(path: pathlib.Path, chance: random.Random) -> None:
    path.with_name("store.db-wal").unlink()


def wrong_value(path: pathlib.Path, chance: random.Random) -> None:
    """The file is a sound database, and a value in it is what no coordinator writes."""
    statements = (
        "UPDATE numbers SET last = 'text'",
        "UPDATE numbers SET last = x'00ff'",
        "UPDATE numbers SET last = -5",
        "UPDATE numbers SET last = 9223372036854775807",
        "UPDATE numbers SET last = 1e300",
        "DELETE FROM numbers",
        "UPDATE members SET record = 7",
        "UPDATE members SET record = 'text'",
        "UPDATE members SET record = x'' WHERE agent_id = 'agent-3'",
        "UPDATE members SET agent_id = x'ff00fe' WHERE agent_id = 'agent-3'",
        "UPDATE members SET agent_id = CAST(x'ff00fe' AS TEXT) WHERE agent_id = 'agent-3'",
        "UPDATE members SET agent_id = 'agent-999' WHERE agent_id = 'agent-3'",
    )
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(chance.choice(statements))


DAMAGES: tuple[Damage, ...] = (
    *(flip_bits, overwrite_part, zero_pages, truncate, swap_pages, not_a_database, wal_missing, wrong_value),
    *(wal_of(damage) for damage in (flip_bits, overwrite_part, truncate, not_a_database)),
)


async def use_or_refuse(path: pathlib.Path, highest: int) -> str:
    """``used``, or the sentence. Raises for everything that is neither."""
    store = SqliteStore(path, LATER_US)
    try:
        await store.open("y", "y:1")
        members = await store.load()
        number = await store.next_number()
        assert number > highest, "an incarnation went back"
        assert {one.agent_id for one in members} <= {f"agent-{one}" for one in range(MEMBERS)}
        await store.put(record("late", number))
        assert "late" in {one.agent_id for one in await store.load()}
        return "used"
    except (ConfigError, CoordinatorUnavailableError) as error:
        return str(error)
    finally:
        await store.close()


@pytest.mark.parametrize(
    ("seed", "rounds"),
    [pytest.param(1, 100, id="100"), pytest.param(2, 1000, id="1000", marks=pytest.mark.nightly)],
)
async def test_a_damaged_file_is_used_safely_or_refused_by_name(
    place: pathlib.Path, kept: Kept, seed: int, rounds: int
) -> None:
    chance = random.Random(seed)
    outcomes: dict[str, set[bool]] = {}
    for number in range(rounds):
        damage = DAMAGES[number % len(DAMAGES)]
        path = kept.copy_to(place / str(number))
        before = {one.name: bytes_of(one) for one in sorted(path.parent.iterdir())}
        damage(path, chance)
        assert before != {one.name: bytes_of(one) for one in sorted(path.parent.iterdir())} or damage is swap_pages
        answer = await use_or_refuse(path, kept.highest)
        told = f"seed {seed}, round {number}, {damage.__name__}: {answer}"
        assert answer == "used" or (f"sqlite:{path}" in answer and any(advice in answer for advice in ADVICE)), told
        outcomes.setdefault(damage.__name__, set()).add(answer == "used")
        shutil.rmtree(path.parent)
    assert outcomes.keys() == {damage.__name__ for damage in DAMAGES}
    assert outcomes["not_a_database"] == {False}
    assert outcomes["wal_missing"] == {True}


def bytes_of(path: pathlib.Path) -> bytes:
    return path.read_bytes()


@pytest.mark.parametrize(
    ("seed", "rounds"),
    [pytest.param(3, 20, id="20"), pytest.param(4, 200, id="200", marks=pytest.mark.nightly)],
)
async def test_a_file_that_is_damaged_while_it_is_used_answers_by_name(
    place: pathlib.Path, kept: Kept, seed: int, rounds: int
) -> None:
    """What the store gave before stays so; a call works or says why not, and none raises anything else."""
    chance = random.Random(seed)
    for number in range(rounds):
        path = kept.copy_to(place / str(number))
        store = SqliteStore(path, LATER_US)
        await store.open("y", "y:1")
        highest = await store.next_number()
        chance.choice((flip_bits, overwrite_part, zero_pages, truncate))(path, chance)
        for one in range(8):
            with contextlib.suppress(CoordinatorUnavailableError):
                given = await store.next_number()
                assert given > highest
                highest = given
            with contextlib.suppress(CoordinatorUnavailableError):
                await store.put(record(f"new-{one}", highest))
            with contextlib.suppress(CoordinatorUnavailableError):
                await store.load()
            await store.admit_number(highest)
        await store.close()
        shutil.rmtree(path.parent)


async def test_a_file_of_zero_bytes_is_a_new_store(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "store.db"
    make_empty(path)
    store = SqliteStore(path, LATER_US)
    await store.open("y", "y:1")
    assert await store.next_number() > LATER_US
    await store.close()


def make_empty(path: pathlib.Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("columns", ["only INTEGER", "last TEXT NOT NULL, more INTEGER NOT NULL"])
async def test_tables_of_another_version_are_refused(tmp_path: pathlib.Path, columns: str) -> None:
    path = tmp_path / "store.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(f"PRAGMA application_id={APPLICATION_ID}")
        database.execute(f"CREATE TABLE numbers ({columns})")
    answer = await use_or_refuse(path, 0)
    assert answer.startswith(f"the store sqlite:{path} ")
    assert "move it away to begin without members" in answer


HOLD = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()
"""


async def test_a_file_that_another_process_has_locked_is_refused(tmp_path: pathlib.Path, kept: Kept) -> None:
    path = kept.copy_to(tmp_path / "store")
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLD, str(path)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"held\n"
    try:
        assert "is in use by another coordinator: a sqlite store has one" in await use_or_refuse(path, kept.highest)
    finally:
        await holder.communicate(b"")
    assert await use_or_refuse(path, kept.highest) == "used"


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@pytest.fixture
def as_common_user() -> Iterator[None]:
    """This thread, and those that it starts, obey the modes of files also where root runs the tests."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = _CapHeader(0x20080522, 0), (_CapData * 2)()
    assert libc.capget(ctypes.byref(header), data) == 0
    before = data[0].effective
    data[0].effective &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    assert libc.capset(ctypes.byref(header), data) == 0
    try:
        yield
    finally:
        data[0].effective = before
        assert libc.capset(ctypes.byref(header), data) == 0


@pytest.mark.parametrize(("what", "mode"), [("store.db", 0o400), ("store.db", 0o000), (".", 0o500), (".", 0o000)])
@pytest.mark.usefixtures("as_common_user")
async def test_a_file_or_a_folder_that_is_read_only_is_refused(
    tmp_path: pathlib.Path, kept: Kept, what: str, mode: int
) -> None:
    path = kept.copy_to(tmp_path / "store")
    path.with_name("store.db-wal").unlink()
    place = path.parent / what
    place.chmod(mode)
    try:
        answer = await use_or_refuse(path, kept.highest)
    finally:
        place.chmod(0o700)
    assert answer.startswith(f"the store sqlite:{path} cannot be ")
    assert "let it, or name another place" in answer
    assert await use_or_refuse(path, kept.highest) == "used"
