"""``--driver aiperf``: the same workload, sent by NVIDIA's aiperf 0.13 in an environment of its own.

Decides how aiperf is started and stopped, and which of its records belongs to which planned request. It must never
import aiperf. Every planned request yields exactly one record: with the planned due time, and aiperf's times beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable

from kvxfer.errors import ConfigError, InvalidArgumentError
from kvxfer.load import aiperf_files
from kvxfer.load.drive.answer import DRIVER_LOST
from kvxfer.load.drive.endpoint import find
from kvxfer.load.drive.start import (
    COMPLETE,
    INTERRUPTED,
    UNREACHED,
    DriveProgress,
    DriveResult,
    StopFlag,
    hearing_interrupts,
)
from kvxfer.load.importers import aiperf as importer
from kvxfer.load.importers import aiperf_raw
from kvxfer.load.importers.fields import Members, read_lines
from kvxfer.load.options import DriveOptions, TargetOptions
from kvxfer.load.record import NOT_SENT, MeasuredRequest
from kvxfer.workload.request import DispatchMode, Workload, WorkloadRequest

VERSION = "0.13"
"""What its files were read of. Others may mean other things by the same names."""
LOOK_S = 0.2
START_S = 300.0
"""How long aiperf may take from its start to its first record, beyond when that can be expected."""
STOP_S = 30.0
"""How long aiperf may take to write its results after it was told to stop."""
EARLY_STOP_S = 5.0
"""The same before its first record: an aiperf that still starts does not end by itself."""
WORDS_MAX = 300


def drive_aiperf(
    workload: Workload,
    body: Callable[[WorkloadRequest], bytes],
    target: TargetOptions,
    options: DriveOptions,
    *,
    run: str,
    warmup: int = 0,
    on_record: Callable[[MeasuredRequest], None],
    on_progress: Callable[[DriveProgress], None] | None = None,
    stop: StopFlag | None = None,
    directory: pathlib.Path | None = None,
) -> DriveResult:
    """Send ``workload`` through aiperf, and tell all records when it has ended.

    ``directory`` keeps what aiperf was given and what it wrote; None: both are removed. Ctrl-C, or ``stop``, has aiperf
    stop and write what it has. The first ``warmup`` requests are marked so.

    Raises ConfigError where ``options.aiperf`` is no command or of another version, for a key or certificates that
    cannot be read and a directory that cannot be written; PeerGoneError where nothing takes a connection; and
    InvalidArgumentError for a workload without requests.
    """
    if not workload.requests:
        raise InvalidArgumentError("the workload has no requests")
    command = find_aiperf(options.aiperf)
    find(target)
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-aiperf-")))
        directory = directory.absolute()
        results = directory / aiperf_files.RESULTS
        if results.exists():
            raise ConfigError(f"{results} is there already: aiperf's results need a directory of their own")
        aiperf_files.write_files(directory, workload, body, target, options)
        started = _AiperfRun(workload, options, results, on_progress, stop)
        stack.enter_context(hearing_interrupts(started.interrupt))
        result = started.run(command, directory, aiperf_files.environment(directory, target, options))
        _tell(workload, results, run, warmup, result, on_record)
        return result


def find_aiperf(command: str) -> str:
    """The path of aiperf's command. Raises ConfigError, which says how its environment is made."""
    made = "make one: python3 -m venv aiperf-venv; aiperf-venv/bin/pip install aiperf==0.13.0"
    path = shutil.which(command)
    if path is None:
        raise ConfigError(f"there is no aiperf at {command!r:.200}; {made}; --aiperf aiperf-venv/bin/aiperf")
    try:
        asked = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{command!r:.200} cannot be started ({error}); {made}") from None
    said = (asked.stdout.strip() or asked.stderr.strip()).rpartition("\n")[2]
    if asked.returncode or not said.split()[-1:] or not f"{said.split()[-1]}.".startswith(f"{VERSION}."):
        raise ConfigError(f"{command!r:.200} must be aiperf {VERSION}, but says {said!r:.100}; {made}")
    return str(pathlib.Path(path).absolute())


class _AiperfRun:
    """aiperf's process, from its start to its end."""

    def __init__(
        self,
        workload: Workload,
        options: DriveOptions,
        results: pathlib.Path,
        on_progress: Callable[[DriveProgress], None] | None,
        stop: StopFlag | None,
    ) -> None:
        self._workload, self._options = workload, options
        self._records = results / importer.RECORDS
        self._on_progress, self._stop = on_progress, stop
        self._interrupts = 0
        self._read = 0
        self._ended = self._failed = 0
        self._first_s: float | None = None
        """When the first record was seen, by the monotonic clock; the last one in ``_last_s``."""
        self._last_s: float | None = None

    def interrupt(self) -> None:
        self._interrupts += 1

    def run(self, command: str, directory: pathlib.Path, environment: dict[str, str]) -> DriveResult:
        """Until aiperf is gone, with all processes of its own."""
        result = DriveResult(0.0, COMPLETE)
        with (directory / aiperf_files.OUTPUT).open("wb") as output:
            process = subprocess.Popen(
                [command, "profile", "--config", str(directory / aiperf_files.SETTINGS)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=directory,
                start_new_session=True,
            )
            try:
                was_told = self._wait(process, result)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode and not was_told:
            words = (directory / aiperf_files.OUTPUT).read_text(errors="replace")
            result.ended = DRIVER_LOST
            result.message = f"aiperf ended with code {process.returncode}: {last_words(words)}"
        return result

    def _wait(self, process: subprocess.Popen[bytes], result: DriveResult) -> bool:
        """Whether it was told to stop."""
        began_s = time.monotonic()
        stopped_s = math.inf
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
            self._look(began_s)
            now_s = time.monotonic()
            is_told = self._interrupts or (self._stop is not None and self._stop.is_set())
            if stopped_s == math.inf and (is_told or now_s > self._over_s(began_s)):
                stopped_s = now_s
                result.ended = INTERRUPTED if is_told else COMPLETE
                result.message = "the run was interrupted" if is_told else ""
                process.send_signal(signal.SIGINT)
            patience_s = STOP_S if self._first_s is not None else EARLY_STOP_S
            if self._interrupts > 1 or now_s - stopped_s > patience_s:
                break
        return stopped_s < math.inf

    def _over_s(self, began_s: float) -> float:
        """When answers are waited for no longer, by the monotonic clock."""
        span_s, drain_s = self._workload.span_s, self._options.drain_s
        if self._first_s is None or self._last_s is None:
            return began_s + START_S + min(span_s, self._options.timeout_s) + drain_s
        return max(self._first_s + span_s, self._last_s) + drain_s

    def _look(self, began_s: float) -> None:
        """Count the records that have come."""
        try:
            with self._records.open("rb") as file:
                file.seek(self._read)
                whole = file.read()
        except OSError:
            whole = b""
        whole = whole[: whole.rfind(b"\n") + 1]
        self._read += len(whole)
        if whole:
            self._last_s = time.monotonic()
            self._first_s = self._first_s or self._last_s
            self._ended += whole.count(b"\n")
            self._failed += sum(b'"error":{' in line for line in whole.splitlines())
        if self._on_progress is not None:
            elapsed_s = 0.0 if self._first_s is None else time.monotonic() - self._first_s
            planned, span_s = len(self._workload.requests), self._workload.span_s
            self._on_progress(DriveProgress(planned, self._ended, self._ended, self._failed, elapsed_s, span_s))


def last_words(output: str) -> str:
    """The last line of aiperf's that says something of an error, without the frames around it."""
    lines = [line.strip(" │╭╮╰╯─\t") for line in output.splitlines()]
    told = [line for line in lines if line]
    errors = [line for line in told if "rror" in line]
    return ([*told, *errors] or ["it says nothing"])[-1][:WORDS_MAX]


def _tell(
    workload: Workload,
    results: pathlib.Path,
    run: str,
    warmup: int,
    result: DriveResult,
    on_record: Callable[[MeasuredRequest], None],
) -> None:
    """Each planned request's record, from aiperf's, and what of the result they say."""
    path = results / importer.RECORDS
    try:
        lines = list(read_lines(path)) if path.exists() else []
        told = {_key(line): line for line in lines}
        begin_ns = _begin_ns(workload, told, results)
        measured = {key: importer.read_record(line, begin_ns) for key, line in told.items()}
        accounts = aiperf_raw.accounts(results / aiperf_raw.RECORDS)
    except ConfigError as error:
        measured, accounts, begin_ns = {}, {}, time.time_ns()
        result.ended, result.message = DRIVER_LOST, f"aiperf's records cannot be read: {error}"
    result.began_unix_s = begin_ns / 1e9
    before: dict[int, float] = {}
    was_sent = False
    for request in workload.requests:
        record = measured.get(aiperf_files.join_key(workload, request))
        due_s = request.due_s
        if due_s is None or (workload.mode is DispatchMode.THINK and request.turn and request.session in before):
            due_s = before.get(request.session if request.session is not None else -1, 0.0) + request.think_s
        told_record = planned_record(request, due_s, run, record)
        told_record.is_warmup = request.number < warmup
        told_record.account = accounts.get(told_record.request_id)
        if record is None and result.ended == DRIVER_LOST:
            told_record.error = DRIVER_LOST
        if request.session is not None:
            before[request.session] = told_record.end_s if told_record.end_s is not None else due_s
        was_sent |= record is not None
        on_record(told_record)
    if not was_sent and result.ended == COMPLETE:
        result.ended, result.message = UNREACHED, "aiperf has sent no request"


def planned_record(request: WorkloadRequest, due_s: float, run: str, record: MeasuredRequest | None) -> MeasuredRequest:
    """What was planned of a request, and aiperf's record of it; None: aiperf has none."""
    planned = MeasuredRequest(
        run=run,
        number=request.number,
        request_id="",
        due_s=due_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens_asked=request.output_tokens,
        session=request.session,
        turn=request.turn,
    )
    if record is None:
        planned.error, planned.message = NOT_SENT, "aiperf has no record of it"
        return planned
    return dataclasses.replace(
        record,
        run=run,
        number=request.number,
        due_s=due_s,
        prompt_tokens=record.prompt_tokens or request.prompt_tokens,
        output_tokens_asked=request.output_tokens,
        session=request.session,
        turn=request.turn,
    )


def _key(line: Members) -> tuple[str, int]:
    metadata = line.object("metadata")
    return metadata.text("conversation_id"), metadata.count_or_none("turn_index") or 0


def _begin_ns(workload: Workload, told: dict[tuple[str, int], Members], results: pathlib.Path) -> int:
    """The Unix time at which aiperf's schedule began, in ns.

    aiperf's summary has it. Where there is none, the request that was issued least late counts as in time, so that a
    lateness that all requests share cannot be seen.
    """
    latest = None
    for request in workload.requests:
        line = told.get(aiperf_files.join_key(workload, request))
        if line is not None and request.turn == 0 and request.due_s is not None:
            metadata = line.object("metadata")
            issued = metadata.count_or_none("credit_issued_ns") or metadata.count_or_none("request_start_ns")
            if issued is not None:
                began = issued - round(request.due_s * 1e9)
                latest = began if latest is None else min(latest, began)
    if latest is None:
        return time.time_ns()
    try:
        summary = json.loads((results / importer.SUMMARY).read_text())
        began = round(datetime.datetime.fromisoformat(summary["start_time"]).timestamp() * 1e6) * 1000
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return latest
    return began if 0 <= latest - began < 60_000_000_000 else latest
