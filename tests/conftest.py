"""Which tier a test is of. Every run of tests has its own state, cache and runtime directories, so that nothing of the
user's is read and nothing is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("tests.support")

settings.register_profile("shared-machine", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
# A change is judged by the same examples every time it is judged; new ones are found while working on it.
settings.load_profile("ci" if os.environ.get("CI") else "shared-machine")

ROOT = pathlib.Path(__file__).resolve().parent.parent

TIERS = ("quick", "deep", "nightly")
"""`make test`, what `.ci/run` adds, and what `make nightly` adds: every test is of exactly one."""

PLACES = {
    "tests/": "quick",
    "tests/benchmarks/test_router.py::test_it_runs": "nightly",
    "tests/benchmarks/test_transfer.py::test_it_runs": "nightly",
    "tests/connectors/sglang/test_lost.py": "deep",
    "tests/cuda/": "nightly",
    "tests/e2e/": "deep",
    "tests/e2e/test_equality.py::test_chunked_prefill_equals_the_single_process": "quick",
    "tests/e2e/test_placement.py": "nightly",
    "tests/e2e/test_prefill_lost.py::test_killed_while_it_is_read[stream]": "quick",
    "tests/e2e/test_refused.py": "nightly",
    "tests/e2e/test_start_failures.py": "nightly",
    "tests/e2e/test_waiting.py": "nightly",
    "tests/faults/": "deep",
    "tests/fuzz/test_corpus.py": "deep",
    "tests/router/faults/": "deep",
    "tests/router/faults/test_drain.py::test_sigterm_finishes_what_runs_and_refuses_what_is_new": "quick",
    "tests/router/faults/test_engines_fail.py::test_a_dead_decode_worker_costs_no_client_an_error": "quick",
    "tests/router/fleet/test_with_mock_engines.py": "deep",
    "tests/router/ui/test_browser.py": "deep",
    "tests/sglang/": "deep",
    "tests/sglang/test_e2e.py": "nightly",
    "tests/sglang/test_e2e_aborts.py": "nightly",
    "tests/sglang/test_e2e_demo.py": "nightly",
    "tests/sglang/test_e2e_engines.py": "nightly",
    "tests/sglang/test_e2e_lost.py": "nightly",
    "tests/sglang/test_e2e_nixl.py": "nightly",
    "tests/sglang/test_e2e_pauses.py": "nightly",
    "tests/load/test_sweep.py": "deep",
    "tests/sglang/test_load.py": "nightly",
    "tests/sglang/test_router.py": "nightly",
    "tests/sglang/test_secured.py": "nightly",
    "tests/vllm/": "nightly",
    "tests/vllm/test_hybrid_smoke.py": "deep",
    "tests/vllm/test_smoke.py": "deep",
}
"""The tier of the tests whose ids begin so; the longest beginning counts. One test, or one value of a parameter, that
takes longer than its neighbours is marked ``deep`` or ``nightly`` where it stands."""


REPEATS = (ROOT / "tests/nightly.txt").read_text().splitlines()
"""The beginnings of the ids of tests that last seconds and repeat a neighbour that runs for each change: with another
lane, engine or direction. They run every night."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """How many tests run at once: two for each processor, for the tests wait for processes, timers and sockets half of
    the time."""
    return 2 * len(os.sched_getaffinity(0))


def tier_of(item: pytest.Item) -> str:
    if item.nodeid.startswith(tuple(REPEATS)):
        return "nightly"
    for tier in TIERS:
        if item.get_closest_marker(tier) is not None:
            return tier
    return PLACES[max((place for place in PLACES if item.nodeid.startswith(place)), key=len)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(tier_of(item))


@pytest.fixture(scope="session", autouse=True)
def private_directories() -> Iterator[pathlib.Path]:
    """A short temporary directory (Unix socket paths are limited) behind every XDG variable, for children too."""
    names = ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR")
    with tempfile.TemporaryDirectory(prefix="kvx-") as directory, pytest.MonkeyPatch.context() as patch:
        for name in names:
            path = pathlib.Path(directory, name.split("_")[1].lower())
            path.mkdir(mode=0o700)
            patch.setenv(name, str(path))
        for name in [name for name in os.environ if name.startswith("KVXFER_") and name != "KVXFER_SANITIZED"]:
            patch.delenv(name)
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield pathlib.Path(directory)


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """A command that a test runs in this process sets up logging, on a stream that ends with the test."""
    loggers = [logging.getLogger(), logging.getLogger("kvxfer")]
    before = [(list(logger.handlers), logger.level) for logger in loggers]
    yield
    for logger, (handlers, level) in zip(loggers, before, strict=True):
        for handler in set(logger.handlers).difference(handlers):
            logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    """The repository root; tests that read the checkout are marked ``checkout``."""
    return ROOT


def epolls() -> set[int]:
    found = set()
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if entry.readlink().name == "anon_inode:[eventpoll]":
                found.add(int(entry.name))
    return found


class Breaker:
    """Has the IO loop of the one core that is started after it meet an internal error, when it is called."""

    def __init__(self) -> None:
        self._before = epolls()

    def __call__(self) -> None:
        with open(os.devnull, "rb") as other:
            for descriptor in epolls() - self._before:
                os.dup2(other.fileno(), descriptor, inheritable=False)


@pytest.fixture
def breaker() -> type[Breaker]:
    return Breaker
