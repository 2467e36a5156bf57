"""The kept corpus goes through every native fuzz target, in the build that KVXFER_FUZZERS names (`make asan`)."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess

import pytest

pytestmark = pytest.mark.checkout

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TARGETS = sorted(path.name.removesuffix("_fuzz.cpp") for path in (ROOT / "kvxfer/_native/fuzz").glob("*_fuzz.cpp"))
BUILD = pathlib.Path(os.environ.get("KVXFER_FUZZERS") or ROOT / "build" / "asan")
CORPUS_BYTES_MAX = 300 << 10


def run(name: str, *files: pathlib.Path) -> subprocess.CompletedProcess[str]:
    program = BUILD / f"kvxfer_fuzz_{name}"
    assert program.exists(), f"{program} is not there: `make asan` builds it"
    return subprocess.run([program, *files], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", TARGETS)
def test_no_kept_input_breaks_its_target(name: str) -> None:
    files = sorted((HERE / "corpus" / name).iterdir())
    done = run(name, *files)
    assert done.returncode == 0, f"{done.stderr[-4000:]}"
    assert done.stderr.splitlines() == [str(file) for file in files]
    assert done.stdout == f"{len(files)} inputs: no crash\n"


def test_every_target_is_fuzzed_and_has_a_corpus() -> None:
    [fuzzed] = re.findall(r"^FUZZERS = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    kept = HERE / "corpus"
    assert fuzzed.split() == TARGETS == sorted(path.name for path in kept.iterdir())
    assert sum(path.stat().st_size for path in kept.glob("*/*")) < CORPUS_BYTES_MAX


def test_a_file_that_is_not_there_is_an_error() -> None:
    missing = HERE / "no-such-file"
    done = run("frames", missing)
    assert done.returncode == 2
    assert str(missing) in done.stderr
