"""The directory of one load test: ``requests.jsonl`` grows while it runs, ``run.json`` and ``summary.csv`` close it.

Decides what stands on disk, when it is written, and what a full disk means. What is good it must never know: summaries
and verdicts come as values and go as JSON. ``run.schema.json`` beside this module has the shape of ``run.json``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvxfer.errors import ClosedError, ConfigError, InvalidArgumentError, KvxferError
from kvxfer.load.document import KINDS, SCHEMA_VERSION, run_document, summary_table
from kvxfer.load.record import MeasuredRequest
from kvxfer.load.run import LoadRun

RUN_FILE = "run.json"
REQUESTS_FILE = "requests.jsonl"
SUMMARY_FILE = "summary.csv"
REPORT_FILE = "report.html"
TIMELINE_FILE = "timeline.json"
PARTIAL = ".partial"
"""End of the name of a file that is being written."""
BUFFER_BYTES = 1 << 16
FLUSH_S = 1.0
RESERVED_BYTES = 1 << 17
"""Kept on the disk from the beginning, so that ``run.json`` can be written where the requests have filled it."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFullError(KvxferError):
    """A file could not be written: the disk is full or fails, or a limit of the process is reached. What was written
    before can be read. It crosses no wire."""

    code = "disk_full"


class RunDirectory:
    """One load test's files while it runs. Not for several threads at once."""

    def __init__(self, path: pathlib.Path, descriptor: int) -> None:
        """Use ``create``."""
        self.path = path
        self._descriptor = descriptor
        self._lines: list[bytes] = []
        self._buffered = 0
        self._written = 0
        self._flushed_s = time.monotonic()
        self._full: DiskFullError | None = None

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """Make the directory, or take an empty one.

        Raises ConfigError where it cannot be made or has files already, DiskFullError where the disk is full.
        """
        place = pathlib.Path(path)
        try:
            place.mkdir(parents=True, exist_ok=True)
            if any(place.iterdir()):
                raise ConfigError(f"{place} has files already; name a new or an empty directory")
            with open(place / (RUN_FILE + PARTIAL), "wb") as file:
                file.write(bytes(RESERVED_BYTES))
                file.flush()
                os.fsync(file.fileno())
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            return cls(place, os.open(place / REQUESTS_FILE, flags, 0o666))
        except OSError as error:
            if error.errno in FULL:
                with contextlib.suppress(OSError):
                    (place / (RUN_FILE + PARTIAL)).unlink()
                raise DiskFullError(f"{_reason(error)}: there is no space for a load test in {place}") from None
            reason = error.strerror or type(error).__name__
            raise ConfigError(f"cannot write into the directory {place}: {reason.lower()}") from None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, record: MeasuredRequest) -> None:
        """Add one line to ``requests.jsonl``; it is on disk within FLUSH_S, if more records come, or at ``flush``.

        Raises DiskFullError: every line that was written whole stays, this and later ones are lost.
        """
        self._check()
        line = record.to_json().encode() + b"\n"
        self._lines.append(line)
        self._buffered += len(line)
        if self._buffered >= BUFFER_BYTES or time.monotonic() - self._flushed_s >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Hand to the kernel what was appended. Raises DiskFullError."""
        self._check()
        data, self._lines, self._buffered = b"".join(self._lines), [], 0
        self._flushed_s = time.monotonic()
        begun = self._written
        try:
            rest = memoryview(data)
            while rest:
                count = os.write(self._descriptor, rest)
                rest = rest[count:]
                self._written += count
        except OSError as error:
            self._written = begun + data.rfind(b"\n", 0, self._written - begun) + 1
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._written)
            file = self.path / REQUESTS_FILE
            self._full = DiskFullError(
                f"{_reason(error)}: {file} has {self._written:,} bytes, all of which can be read"
            )
            raise self._full from None

    def finish(
        self,
        kind: str,
        runs: Sequence[LoadRun],
        summaries: Sequence[Any],
        verdicts: Mapping[str, Sequence[Any]] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> StoredLoadTest:
        """Write ``run.json`` and ``summary.csv``, each whole or not at all, and close.

        ``kind``: one of KINDS. ``summaries``: one for each run, in order. ``verdicts``: by the run's name; under the
        empty name those of the whole. ``extra``: what a search or a sweep found besides. All may be dataclasses or
        what JSON has. After a full disk it may be called all the same: space for ``run.json`` was kept. Raises
        DiskFullError; InvalidArgumentError for another kind, or for more or fewer summaries than runs.
        """
        if self._descriptor < 0:
            raise ClosedError(f"{self.path} is finished")
        if kind not in KINDS or len(summaries) != len(runs):
            raise InvalidArgumentError(f"kind must be one of {', '.join(KINDS)}, with one summary for each run")
        if self._full is None:
            with contextlib.suppress(DiskFullError):
                self.flush()
        document = run_document(kind, runs, summaries, verdicts or {}, extra or {}, self._files())
        try:
            write_whole(self.path / RUN_FILE, json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False))
            write_whole(self.path / SUMMARY_FILE, summary_table(document))
        finally:
            self.close()
        return StoredLoadTest(kind=kind, document=document, runs=list(runs))

    def close(self) -> None:
        """Write what was appended, where it can be, and let go of the files. Without ``finish`` the directory can be
        read all the same: as a load test that was cut off."""
        if self._descriptor < 0:
            return
        if self._full is None:
            with contextlib.suppress(DiskFullError, OSError):
                self.flush()
        with contextlib.suppress(OSError):
            os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        (self.path / (RUN_FILE + PARTIAL)).unlink(missing_ok=True)

    def _check(self) -> None:
        if self._descriptor < 0:
            raise ClosedError(f"{self.path} is finished")
        if self._full is not None:
            raise self._full

    def _files(self) -> list[str]:
        return [RUN_FILE, REQUESTS_FILE, SUMMARY_FILE]


@dataclasses.dataclass
class StoredLoadTest:
    """A load test as its directory has it."""

    kind: str
    """One of KINDS, or ``unfinished``: there is no ``run.json``."""
    document: dict[str, Any]
    """``run.json``; empty where there is none."""
    runs: list[LoadRun]
    notes: list[str] = dataclasses.field(default_factory=list)
    """What was noticed while it was read, in sentences."""

    @property
    def summaries(self) -> list[dict[str, Any]]:
        """One for each run, as JSON has them: ``inf`` stands for infinity. Empty for a run without one."""
        listed = {run["name"]: run.get("summary") or {} for run in self.document.get("runs", ())}
        return [listed.get(run.name, {}) for run in self.runs]

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        """``run`` (empty: the whole), ``name``, ``sentence``, ``is_failure``."""
        return list(self.document.get("verdicts", ()))


def read(path: str | os.PathLike[str]) -> StoredLoadTest:
    """A load test's directory. A last line of ``requests.jsonl`` that was cut is left out, and ``notes`` says so.

    Raises InvalidArgumentError for a directory of something else, another schema version, or a broken file.
    """
    place = pathlib.Path(path)
    notes: list[str] = []
    document = _read_document(place)
    if not isinstance(document.get("runs", []), list):
        raise InvalidArgumentError(f"{place / RUN_FILE} has no list of runs")
    runs = {run.name: run for run in map(_run_of, document.get("runs", ()))}
    if not document:
        notes.append(f"{RUN_FILE} is missing: the load test was cut off, and all of its requests are counted.")
    try:
        for record in _read_records(place / REQUESTS_FILE, notes):
            if record.run not in runs:
                runs[record.run] = LoadRun(record.run, "", 0.0, (0.0, float("inf")), ended="cut off")
            runs[record.run].records.append(record)
    except FileNotFoundError:
        if not document:
            raise InvalidArgumentError(f"{place} is no load test's directory: it has no {RUN_FILE}") from None
        notes.append(f"{REQUESTS_FILE} is missing: only the summaries are left.")
    except OSError as error:
        raise InvalidArgumentError(f"{place / REQUESTS_FILE} cannot be read: {error.strerror}") from None
    return StoredLoadTest(document.get("kind", "unfinished"), document, list(runs.values()), notes)


def _read_document(place: pathlib.Path) -> dict[str, Any]:
    file = place / RUN_FILE
    try:
        document = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InvalidArgumentError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError:
        raise InvalidArgumentError(f"{file} is not JSON") from None
    if not isinstance(document, dict) or "schema_version" not in document:
        raise InvalidArgumentError(f"{file} is not of a load test: it has no schema_version")
    if document["schema_version"] != SCHEMA_VERSION:
        version = document["schema_version"]
        raise InvalidArgumentError(f"{file} has schema version {version!r:.40}; this kvxfer reads {SCHEMA_VERSION}")
    return document


def _run_of(values: dict[str, Any]) -> LoadRun:
    names = {field.name for field in dataclasses.fields(LoadRun)} - {"records"}
    try:
        known = {name: value for name, value in values.items() if name in names}
        begin, end = (float(one) for one in values["window_s"])
        return LoadRun(**{**known, "window_s": (begin, end)})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{RUN_FILE} has a run that cannot be read: {error!r:.200}") from None


def _read_records(file: pathlib.Path, notes: list[str]) -> Iterator[MeasuredRequest]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield _checked(MeasuredRequest.from_json(line))
            except InvalidArgumentError as error:
                if line.endswith(b"\n"):
                    raise InvalidArgumentError(f"{file}, line {number}: {error}") from None
                notes.append(f"The last line of {REQUESTS_FILE} was cut and is left out.")


SECONDS_MAX = 1e12
"""What is longer is no time."""
_TIMES = ("due_s", "begun_s", "sent_s", "first_s", "last_s", "end_s", "longest_gap_s")
_COUNTS = (
    *("number", "prompt_tokens", "output_tokens_asked", "output_tokens", "first_chunk_tokens", "hidden_tokens"),
    *("chunks", "arrivals", "turn"),
)
_TEXTS = ("run", "request_id", "error", "message", "tokens_from", "finish_reason")
_NEEDED = ("due_s", *_COUNTS[:3], *_COUNTS[4:])


def _checked(record: MeasuredRequest) -> MeasuredRequest:
    """The record, if what others compute with is of the right kind."""
    for name in _TIMES:
        value = getattr(record, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < SECONDS_MAX
        _check(is_number or (value is None and name not in _NEEDED), name, value)
    for name in _COUNTS:
        value = getattr(record, name)
        is_count = isinstance(value, int) and not isinstance(value, bool)
        _check(is_count or (value is None and name not in _NEEDED), name, value)
    for name in _TEXTS:
        _check(isinstance(getattr(record, name), str), name, getattr(record, name))
    return record


def _check(is_right: bool, name: str, value: object) -> None:
    if not is_right:
        raise InvalidArgumentError(f"not a record of a load test: {name} is {value!r:.80}")


def _reason(error: OSError) -> str:
    texts = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the quota of the disk is used up",
        errno.EFBIG: "the file may not grow",
    }
    return texts.get(error.errno or 0, f"the disk fails ({(error.strerror or type(error).__name__).lower()})")


def write_whole(file: pathlib.Path, text: str) -> None:
    """Replace the file, so that there is always a whole one. What has its name with PARTIAL is used as space for it.

    Raises DiskFullError.
    """
    partial = file.with_name(file.name + PARTIAL)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb") as out:
            out.write(text.encode("utf-8", "backslashreplace"))
            out.flush()
            out.truncate()
            os.fsync(out.fileno())
        os.replace(partial, file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DiskFullError(f"{_reason(error)}: {file} was not written") from None
