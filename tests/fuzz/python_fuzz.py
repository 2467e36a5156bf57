"""Fuzzes the Python decoders of foreign bytes (python_targets), guided by which instructions follow which.

    python -m tests.fuzz.python_fuzz ARGUMENTS

    [--seconds N] [--seed N] [TARGET ...]   fuzz these targets, or all, together for so long
    --merge [TARGET ...]                    make their kept corpus anew: few inputs of all coverage
    --input FILE TARGET                     run one input

Fuzzing begins with the seeds of a target, its kept corpus and what was found here before. An input that breaks it, or
takes more than RUN_S, is written to build/fuzz/python-TARGET-HASH; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import logging
import pathlib
import random
import re
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import kvxfer
from tests.fuzz import python_targets
from tests.fuzz.python_mutate import Mutator
from tests.fuzz.python_targets.samples import Target

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEPT = pathlib.Path(__file__).resolve().parent / "corpus-python"
BUILD = ROOT / "build" / "fuzz"
RUN_S = 10
STACK_FRAMES = 400
"""That a target may use, whoever runs it: what is nested too deep is so in every run."""
ENTRIES_MAX = 60
CORPUS_BYTES_MAX = 40_000
"""Of one target's kept corpus, beside what has a name."""
_HASH = re.compile(r"[0-9a-f]{16}")
_DECODERS = str(pathlib.Path(kvxfer.__file__).parent) + "/"
_NO_DECODERS = (_DECODERS + "_pb/", _DECODERS + "testing/")

Arc = tuple[int, int, int]
"""A code object, and two instructions of it; for an exception its class and where it was met."""


class SlowInput(BaseException):
    """Nothing that a decoder may catch."""


def run(target: Target, data: bytes) -> bool:
    """Whether ``data`` is a value. Raises whatever a target may not raise."""
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + STACK_FRAMES)
    try:
        target.read(data)
    except target.errors:
        return False
    finally:
        sys.setrecursionlimit(limit)
    return True


class Coverage:
    """Which instructions of kvxfer followed which in one function, and which exceptions met them."""

    def __init__(self) -> None:
        self._arcs: set[Arc] = set()
        self._codes: dict[int, types.CodeType | None] = {}

    def of(self, target: Target, data: bytes) -> set[Arc]:
        """Of one run, whatever it raises."""
        self._arcs = set()
        sys.settrace(self._call)
        try:
            run(target, data)
        except Exception:
            pass
        finally:
            sys.settrace(None)
        return self._arcs

    def lines(self, arcs: Iterable[Arc]) -> int:
        """How many lines they are of."""
        places = {(code, offset // 2) for code, _, offset in arcs}
        return len({(code, list(self._codes[code].co_positions())[place][0]) for code, place in places})  # type: ignore[union-attr]

    def _call(self, frame: Any, event: str, _: Any) -> Callable[..., Any] | None:
        code = id(frame.f_code)
        if code not in self._codes:
            file = frame.f_code.co_filename
            is_decoder = file.startswith(_DECODERS) and not file.startswith(_NO_DECODERS)
            self._codes[code] = frame.f_code if is_decoder else None
        if self._codes[code] is None:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        arcs, last = self._arcs, 0

        def local(frame: Any, event: str, argument: Any) -> Callable[..., Any]:
            nonlocal last
            offset = frame.f_lasti
            if event == "opcode":
                arcs.add((code, last, offset))
                last = offset
            elif event == "exception":
                arcs.add((code, id(argument[0]), offset))
            return local

        return local


@dataclasses.dataclass
class Result:
    """What came of fuzzing one target."""

    runs: int
    inputs: int
    arcs: int
    lines: int
    broken: pathlib.Path | None = None


class Fuzzer:
    """Of one target. What is new is written to ``found``, and what breaks it to a file that begins with ``broken``."""

    def __init__(self, target: Target, source: random.Random, *, found: pathlib.Path, broken: pathlib.Path) -> None:
        self._target = target
        self._random = source
        self._mutator = Mutator(source, target.message)
        self._found = found
        self._broken = broken
        self._coverage = Coverage()
        self._seen: set[Arc] = set()
        self._inputs: list[bytes] = []
        self._runs = 0

    def fuzz(self, begin: Iterable[bytes], seconds: float) -> Result:
        """From these inputs, so long or until one breaks the target."""
        end_s = time.monotonic() + seconds
        with watched():
            path = next((path for data in begin if (path := self._try(data)) is not None), None)
            while path is None and time.monotonic() < end_s:
                recent = self._inputs[-max(1, len(self._inputs) // 10) :]
                parents = recent if self._random.randrange(2) else self._inputs
                data = self._mutator.child(parents)
                before = len(self._inputs)
                path = self._try(data)
                if len(self._inputs) > before:
                    (self._found / name_of(data)).write_bytes(data)
        return Result(self._runs, len(self._inputs), len(self._seen), self._coverage.lines(self._seen), path)

    def _try(self, data: bytes) -> pathlib.Path | None:
        """Where it was written, if it breaks the target. What was traced proves nothing: it had less of the stack."""
        self._runs += 1
        signal.setitimer(signal.ITIMER_PROF, RUN_S)
        try:
            arcs = self._coverage.of(self._target, data)
            run(self._target, data)
        except (Exception, SlowInput):
            signal.setitimer(signal.ITIMER_PROF, 0)
            path = self._broken.with_name(self._broken.name + name_of(data))
            path.write_bytes(data)
            traceback.print_exc()
            return path
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if not self._inputs or not arcs <= self._seen:
            self._seen |= arcs
            self._inputs.append(data)
        return None


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Within the block the alarm clock ends a run."""

    def ring(*_: Any) -> None:
        raise SlowInput(f"it took more than {RUN_S} s of processor time")

    before = signal.signal(signal.SIGPROF, ring)
    try:
        yield
    finally:
        signal.signal(signal.SIGPROF, before)


def name_of(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()[:16]


def files_of(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def fewest(target: Target, named: Iterable[bytes], others: Iterable[bytes]) -> list[bytes]:
    """Of ``others`` those that add most to the coverage of ``named``, small ones first, within the bounds."""
    coverage = Coverage()
    seen = set().union(*(coverage.of(target, data) for data in named))
    arcs = {data: coverage.of(target, data) for data in sorted(set(others), key=lambda data: (len(data), data))}
    chosen: list[bytes] = []
    while len(chosen) < ENTRIES_MAX:
        room = CORPUS_BYTES_MAX - sum(map(len, chosen))
        fitting = [data for data in arcs if len(data) <= room]
        best = max(fitting, key=lambda data: len(arcs[data] - seen), default=None)
        if best is None or arcs[best] <= seen:
            break
        seen |= arcs[best]
        chosen.append(best)
    return chosen


def fuzz_all(names: Sequence[str], seconds: float, seed: int) -> int:
    """The exit status. Each target has its share of what is left."""
    status, end_s = 0, time.monotonic() + seconds
    for place, name in enumerate(names):
        target, found = python_targets.TARGETS[name], BUILD / "corpus-python" / name
        found.mkdir(parents=True, exist_ok=True)
        share_s = (end_s - time.monotonic()) / (len(names) - place)
        fuzzer = Fuzzer(target, random.Random(seed), found=found, broken=BUILD / f"python-{name}-")
        begin = [*target.seeds, *(path.read_bytes() for path in (*files_of(KEPT / name), *files_of(found)))]
        done = fuzzer.fuzz(begin, share_s)
        print(f"{name}: {done.runs} runs, {done.inputs} inputs, {done.arcs} arcs, {done.lines} lines", flush=True)
        if done.broken is not None:
            data, path = done.broken.read_bytes(), done.broken.relative_to(ROOT)
            print(f"input of {len(data)} bytes: {path}: {data[:100].hex()}", file=sys.stderr)
            print(f"to run it again: {sys.argv[0]} --input {path} {name}", file=sys.stderr, flush=True)
            status = 1
    return status


def merge(name: str) -> None:
    """The kept corpus of one target anew, of what is kept and what was found. What has a name that is no hash stays."""
    target, directory = python_targets.TARGETS[name], KEPT / name
    directory.mkdir(parents=True, exist_ok=True)
    hashed = [path for path in files_of(directory) if _HASH.fullmatch(path.name)]
    named = [path.read_bytes() for path in files_of(directory) if path not in hashed]
    found = [path.read_bytes() for path in (*hashed, *files_of(BUILD / "corpus-python" / name))]
    chosen = fewest(target, named, [*target.seeds, *found])
    for path in hashed:
        path.unlink()
    for data in chosen:
        (directory / name_of(data)).write_bytes(data)
    print(f"{name}: {len(chosen)} inputs of {len(found)}, {sum(map(len, chosen))} bytes", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="fuzzes the Python decoders of foreign bytes")
    parser.add_argument("names", nargs="*", metavar="TARGET", help="all of them where none is named")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--merge", action="store_true")
    parser.add_argument("--input", type=pathlib.Path)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    names = args.names or list(python_targets.TARGETS)
    if unknown := set(names) - set(python_targets.TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    if args.input is not None:
        data = args.input.read_bytes()
        for name in names:
            print(f"{name}: {'a value' if run(python_targets.TARGETS[name], data) else 'refused'}")
        return 0
    if args.merge:
        for name in names:
            merge(name)
        return 0
    return fuzz_all(names, args.seconds, args.seed)


if __name__ == "__main__":
    sys.exit(main())
