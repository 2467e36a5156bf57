"""The pages about the agent: their examples run and print what they say, and every name on them exists."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

import kvxfer
from kvxfer import errors

pytestmark = pytest.mark.checkout

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGE = DOCS / "agent.md"


@pytest.mark.parametrize("name", ["agent.md", "descriptors.md"])
def test_the_example_runs(name: str) -> None:
    text = (DOCS / name).read_text()
    example, output = re.search(r"```python\n(.*?)```.*?```\n(.*?)```", text, re.DOTALL).groups()
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


def test_the_errors_exist() -> None:
    table = re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.MULTILINE)
    names = {name for row in table for name in re.findall(r"`([A-Z]\w+)`", row)}
    assert len(names) >= 12
    for name in names:
        assert issubclass(getattr(errors, name), kvxfer.KvxferError)
