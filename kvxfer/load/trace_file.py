"""A trace on a disk: opens the files that a format has, and says where they come from.

Decides what is opened, and how much is read of it. Knows nothing of what is done with the requests.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import stat
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from kvxfer.errors import ConfigError
from kvxfer.workload.published import source_of
from kvxfer.workload.readers.detect import detected_format, peeked, read_trace
from kvxfer.workload.readers.rows import LINE_MAX, TraceRead, TraceRowError
from kvxfer.workload.readers.servegen import (
    CLIENTS_MAX,
    ServeGenClient,
    drawn_requests,
    read_lengths,
    read_rates,
)

CHUNK = 1 << 20
RATES, LENGTHS = "-trace.csv", "-dataset.json"
"""The ends of the names of ServeGen's two files for each client."""


@dataclasses.dataclass(frozen=True)
class TraceFile:
    """A trace, and how much of it is wanted."""

    path: pathlib.Path
    format_name: str
    """One of the readers' FORMATS, or ``auto``."""
    rows_max: int
    """The first rows."""
    output_tokens: int
    """Of a prompt whose row says nothing about its answer."""
    seed: int
    """For formats that requests are drawn from."""
    end_s: float
    """For those: no request later than that is drawn."""

    def read(self) -> tuple[TraceRead, str]:
        """The trace, and where it comes from in words: with its licence where its SHA-256 is known. A file is read once
        from its beginning, so it may be a pipe. Raises ConfigError, which names file and line."""
        path = self.path
        try:
            if path.is_dir():
                if self.format_name not in ("auto", "servegen"):
                    raise ConfigError(f"{path} is a directory: only servegen has directories, not {self.format_name}")
                return self._drawn(sorted(path.glob(f"*{RATES}"))), f"drawn from the ServeGen clients in {path.name}"
            with path.open("rb") as file:
                lines = _Lines(file)
                first, every = peeked(lines)
                name = self.format_name
                if name == "auto" and first:
                    name = detected_format(first)
                if name == "servegen":
                    return self._drawn([path]), f"drawn from the ServeGen client {path.name}"
                found = read_trace(every, name, rows_max=self.rows_max, output_tokens=self.output_tokens)
                digest = lines.digest()
        except OSError as error:
            raise ConfigError(f"trace {path} cannot be read: {error.strerror or error}") from None
        except TraceRowError as error:
            raise ConfigError(f"{path}, {error}") from None
        return found, source_of(digest) or f"{path.name}{f' (SHA-256 {digest[:16]})' if digest else ''}"

    def _drawn(self, paths: Sequence[pathlib.Path]) -> TraceRead:
        if not paths:
            raise ConfigError(f"{self.path} has no file *{RATES}: it is no directory of ServeGen's")
        if len(paths) > CLIENTS_MAX:
            raise ConfigError(f"{self.path} has more than {CLIENTS_MAX} files *{RATES}")
        clients = [self._client(path) for path in paths]
        return drawn_requests(clients, self.seed, rows_max=self.rows_max, end_s=self.end_s)

    def _client(self, path: pathlib.Path) -> ServeGenClient:
        name = path.name.removesuffix(RATES)
        opened = path
        try:
            with path.open("rb") as file:
                rates = read_rates(_Lines(file))
            opened = path.with_name(name + LENGTHS)
            with opened.open("rb") as file:
                lengths = read_lengths("".join(_Lines(file)))
        except OSError as error:
            raise ConfigError(f"trace {opened} cannot be read: {error.strerror or error}") from None
        except TraceRowError as error:
            raise ConfigError(f"{opened}, {error}") from None
        return ServeGenClient(name, rates, lengths)


class _Lines:
    """The lines of an open file, as text. Of a line beyond its bound no more is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[str]:
        """Raises TraceRowError for a line that is too long, or no UTF-8."""
        number = 0
        while line := self._file.readline(LINE_MAX + 1):
            number += 1
            self._digest.update(line)
            if len(line) > LINE_MAX:
                raise TraceRowError(number, "", f"a line must have at most {LINE_MAX} bytes")
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                raise TraceRowError(number, "", f"a trace must be UTF-8 text: {error.reason}") from None

    def digest(self) -> str:
        """SHA-256 of the whole file; empty where it is a pipe, of which the rest may never come."""
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            return ""
        while data := self._file.read(CHUNK):
            self._digest.update(data)
        return self._digest.hexdigest()
