"""What the scripts in .ci name, and what they do where something is missing."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.checkout
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["Makefile", ".ci/test-gpu", ".ci/test-pythons"])
def test_the_files_that_it_names_exist(name: str) -> None:
    named = set(re.findall(r"\b(?:tests|benchmarks)/[\w/]+\.(?:py|txt)\b", (ROOT / name).read_text()))
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []


def test_the_gpu_command_runs_what_needs_a_device() -> None:
    """Whatever is marked with ``needs_device`` is in the folder that it runs."""
    marked = [
        path
        for path in ROOT.glob("tests/**/test_*.py")
        if re.search(r"^from .*\bneeds_device$", path.read_text(), re.M)
    ]
    assert marked
    assert {path.parent for path in marked} == {ROOT / "tests/cuda"}
    assert "TESTS='tests/cuda'" in (ROOT / ".ci/test-gpu").read_text()


def test_a_machine_without_a_cuda_device_is_named(tmp_path: pathlib.Path) -> None:
    """A package in torch's place, which says that there is none."""
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    skipped = tmp_path / "skipped"
    (tmp_path / "python").write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    environment = {**os.environ, "PY": str(tmp_path / "python"), "SKIPPED": str(skipped)}
    done = subprocess.run([ROOT / ".ci/test-gpu"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 77
    assert done.stderr == skipped.read_text()
    assert "no CUDA device" in done.stderr


def test_a_python_that_is_missing_is_named(tmp_path: pathlib.Path) -> None:
    skipped = tmp_path / "skipped"
    environment = {
        **os.environ,
        "PY": sys.executable,
        "SKIPPED": str(skipped),
        "PYTHONS": "3.0",
        "PYENV_ROOT": str(tmp_path),
    }
    done = subprocess.run([ROOT / ".ci/test-pythons"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 77
    assert done.stderr == skipped.read_text()
    assert "Python 3.0" in done.stderr
