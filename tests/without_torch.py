"""A pytest plugin for an environment without torch: what fails because torch, or what is built on it, is not installed
is left out, and the number of it is said at the end. Any other failure stays one.

    pytest -p tests.without_torch
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Generator
from typing import Any

import pytest

MISSING = re.compile(
    r"No module named '(torch|transformers|accelerate|huggingface_hub)['.]"
    r"|the built-in engine needs (torch|transformers)"
)
TESTS = pathlib.Path(__file__).parent
PLACES = ("cli/test_main.py", "cuda", "e2e", "engine")
"""Whose tests start the built-in engine, most of them in processes of its own."""
SKIPS = re.compile(r"needs torch, which|could not import '(torch|transformers|accelerate)")
REASON = "needs torch, which is not installed here"


def left_out(report: Any) -> None:
    if report.failed and MISSING.search(str(report.longrepr)):
        report.outcome, report.longrepr = "skipped", (report.nodeid, 0, f"Skipped: {REASON}")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    report = yield
    left_out(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    report = yield
    left_out(report)
    return report


def pytest_ignore_collect(collection_path: pathlib.Path) -> bool | None:
    """Before a conftest there imports torch."""
    return True if collection_path in [TESTS / place for place in PLACES] else None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [one for one in terminalreporter.stats.get("skipped", []) if SKIPS.search(str(one.longrepr))]
    files = {one.nodeid for one in skipped if "::" not in one.nodeid}
    tests = len(skipped) - sum("::" not in one.nodeid for one in skipped)
    terminalreporter.write_line(
        f"kvxfer: left out, because they need torch: {tests} tests, {len(files)} other files, and all of"
        f" {', '.join('tests/' + place for place in PLACES)}"
    )
