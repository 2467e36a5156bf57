"""Tests that run inside SGLang's environment (`make test-sglang`): its real classes on a CPU. Elsewhere they are not
even collected; those of kvxfer's router and load test before its servers run elsewhere (`make test-sglang-router`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
from collections.abc import Iterator

import pytest

from tests.support.sglang import launch

HERE = pathlib.Path(__file__).resolve().parent
# By what is installed: `benchmarks/sglang.py` has that name too, where benchmarks are importable.
HAS_SGLANG = any(importlib.metadata.distributions(name="sglang"))
ELSEWHERE = ("test_load.py", "test_router.py", "test_secured.py")
collect_ignore = [path.name for path in HERE.glob("test_*.py") if (path.name in ELSEWHERE) == HAS_SGLANG]

if HAS_SGLANG:
    if importlib.util.find_spec("torchvision") is None:
        raise pytest.UsageError(f"PYTHONPATH lacks {launch.STUBS}: `make test-sglang` names it")
    os.environ.update(launch.ENVIRONMENT)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.checkout)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model's directory, as far as two roles compare it: a config, and a file of weights."""
    from tests.support.sglang.ranks import make_model

    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def world(model: pathlib.Path) -> Iterator[object]:
    """A bootstrap server with one prefill and one decode rank."""
    from tests.support.sglang.ranks import World

    with World(model) as world:
        yield world


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A prefill, a decode and a server that does both; a proxy before the first two. All files of `make
    test-sglang-e2e` share them, and leave all of them serving."""
    from tests.support.sglang.cluster import Cluster

    with Cluster(tmp_path_factory.mktemp("servers")) as cluster:
        yield cluster
