"""The store in one file, for one coordinator: what was written is there after a power cut. Decides what a trouble of
the file means in words; must never run on the event loop, or judge a member.

One thread has the only connection. The connection holds sqlite's exclusive lock as long as it is open, and the kernel
takes the lock back when the process dies, however it dies.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import pathlib
import sqlite3
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from kvxfer.coordinator.store.base import MemberRecord, NumberLine, StoreChange, readable
from kvxfer.errors import ConfigError, CoordinatorUnavailableError
from kvxfer.types import AgentRef

log = logging.getLogger("kvxfer.coordinator")

APPLICATION_ID = 0x6B767866
"""``kvxf``: what makes a sqlite file ours."""
LOCK_WAIT_S = 1.0
NUMBER_END = 1 << 62
"""No counter reaches it: it counts from microseconds since 1970, so this is the year 148,000."""
NEEDS = "the coordinator writes to this file and makes others beside it: let it, or name another place"
SCHEMA = """
CREATE TABLE IF NOT EXISTS numbers (only INTEGER PRIMARY KEY CHECK (only = 1), last INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS members (
    agent_id TEXT PRIMARY KEY, number INTEGER NOT NULL, sessions INTEGER NOT NULL, record BLOB NOT NULL
);
"""

Value = TypeVar("Value")


class SqliteStore:
    """Durable with the return of each call: ``synchronous=FULL``."""

    is_shared = False

    def __init__(self, path: pathlib.Path, wall_clock_us: int) -> None:
        """``wall_clock_us``: microseconds since 1970; where the file has no counter yet, it begins there.
        Raises ConfigError for a path that sqlite takes for a store in memory, or for a URL."""
        if str(path).startswith((":", "file:")):
            raise ConfigError(f"store must name a file after sqlite:, not {str(path)!r:.100}; memory keeps nothing")
        self._path = path
        self._numbers = NumberLine(wall_clock_us)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="kvxfer-store")
        self._connection: sqlite3.Connection | None = None

    async def open(self, owner: str, address: str) -> None:
        """Raises ConfigError: the file cannot be opened, is none of ours, is damaged, or has another coordinator."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._open)
        except sqlite3.Error as error:
            raise ConfigError(self._why_not(error)) from None
        except OSError as error:
            raise ConfigError(f"the store {self} cannot be opened: {error.strerror}; {NEEDS}") from None

    def _open(self) -> None:
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self._path, timeout=LOCK_WAIT_S, isolation_level=None, check_same_thread=False)
        try:
            for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL"):
                connection.execute(f"PRAGMA {pragma}")
            connection.execute("BEGIN EXCLUSIVE")
            (found,) = connection.execute("PRAGMA application_id").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if found != APPLICATION_ID and (found or tables):
                raise ConfigError(f"the store {self} is a database of another program")
            problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                raise sqlite3.DatabaseError(problem)
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            for statement in SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute("INSERT OR IGNORE INTO numbers VALUES (1, ?)", (self._numbers.last,))
            self._numbers.stored(self._last_number(connection))
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, connection.close)
        self._thread.shutdown(wait=False)

    async def next_number(self) -> int:
        def ask(connection: sqlite3.Connection) -> int:
            number = self._numbers.above(self._last_number(connection))
            connection.execute("UPDATE numbers SET last = ?", (number,))
            return number

        return await self._run(ask)

    def _last_number(self, connection: sqlite3.Connection) -> int:
        """The counter in the file, also of a clock that was ahead. Raises sqlite3.DatabaseError for what no coordinator
        wrote: in a file that is damaged it may be of any type, or absent."""
        row = connection.execute("SELECT last FROM numbers").fetchone()
        if row is None or type(row[0]) is not int or not 0 <= row[0] < NUMBER_END:
            found = "absent" if row is None else f"{row[0]!r:.60}"
            raise sqlite3.DatabaseError(f"its counter of incarnations is {found}")
        return int(row[0])

    async def admit_number(self, number: int) -> None:
        if not self._numbers.admit(number):
            return
        try:
            await self._run(lambda connection: connection.execute("UPDATE numbers SET last = max(last, ?)", (number,)))
        except CoordinatorUnavailableError as error:
            log.warning("number %d is remembered in memory only: %s", number, error)

    async def put(self, record: MemberRecord) -> None:
        row = (record.agent_id, *record.version, record.to_bytes())
        await self._run(
            lambda connection: connection.execute(
                "INSERT INTO members VALUES (?, ?, ?, ?) ON CONFLICT (agent_id) DO UPDATE "
                "SET number = excluded.number, sessions = excluded.sessions, record = excluded.record "
                "WHERE (number, sessions) <= (excluded.number, excluded.sessions)",
                row,
            )
        )

    async def remove(self, ref: AgentRef, sessions: int) -> None:
        row = (ref.agent_id, ref.incarnation.number, sessions)
        await self._run(
            lambda connection: connection.execute(
                "DELETE FROM members WHERE agent_id = ? AND (number, sessions) <= (?, ?)", row
            )
        )

    async def load(self) -> tuple[MemberRecord, ...]:
        rows = await self._run(lambda connection: connection.execute("SELECT agent_id, record FROM members").fetchall())
        records, wrong = readable(dict(rows))
        for agent_id, error in wrong:
            log.error("the store %s: member %r is left out: %s", self, agent_id, error)
        return tuple(records)

    async def watch(self) -> AsyncIterator[StoreChange]:
        await asyncio.Event().wait()
        yield StoreChange(False, {})

    async def check(self) -> None:
        await self.next_number()  # only what changes a page reaches the disk, and a number may stay unused

    async def catch_up(self) -> None:
        pass

    def __repr__(self) -> str:
        return f"sqlite:{self._path}"

    async def _run(self, ask: Callable[[sqlite3.Connection], Value]) -> Value:
        """One transaction on the store's thread. Raises CoordinatorUnavailableError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, ask)
        except (sqlite3.Error, RuntimeError) as error:  # RuntimeError: the thread is gone, because we are closed
            raise CoordinatorUnavailableError(self._why_not(error)) from None

    def _transact(self, ask: Callable[[sqlite3.Connection], Value]) -> Value:
        connection = self._connection
        if connection is None:
            raise RuntimeError("it is closed")
        connection.execute("BEGIN IMMEDIATE")
        try:
            value = ask(connection)
            connection.execute("COMMIT")
            return value
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def _why_not(self, error: Exception) -> str:
        """The one sentence that an operator gets."""
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return f"the store {self} is in use by another coordinator: a sqlite store has one"
        if name.startswith("SQLITE_FULL"):
            return f"the store {self} cannot be written: the disk is full"
        if name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")):
            return f"the store {self} cannot be written ({error}); {NEEDS}"
        if name in ("SQLITE_ERROR", "SQLITE_SCHEMA", "SQLITE_CONSTRAINT_NOTNULL"):
            return f"the store {self} has tables of another version ({error}); move it away to begin without members"
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")) or (not name and isinstance(error, sqlite3.Error)):
            return f"the store {self} is damaged or no database ({error}); move it away to begin without members"
        return f"the store {self} cannot be used: {error}"
