"""The newest vLLM that is supported without having run: its source says of every fact that the connector relies on what
it said when it was last looked at. Read out of the wheel, which is downloaded once a user; nothing is installed.

``VLLM_READ_VERSION`` names another version, ``VLLM_WHEEL`` a wheel (or a directory that holds ``vllm``) that is there.
"""

from __future__ import annotations

import ast
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

from tests.support.vllm_connector.interface import MANIFEST, DirectoryTree, differences, facts_of, lines_of, open_tree

VERSION = os.environ.get("VLLM_READ_VERSION", "0.33.0")
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "kvxfer" / "vllm-wheels"
"""Of the user: asked before the tests get directories of their own."""
DOWNLOAD_S = 1200.0


def wheel() -> pathlib.Path:
    """Of some hundred MB."""
    if named := os.environ.get("VLLM_WHEEL"):
        return pathlib.Path(named)
    kept = sorted(CACHE.glob(f"vllm-{VERSION}-*.whl"))
    if not kept:
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", str(CACHE), f"vllm=={VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DOWNLOAD_S)
        kept = sorted(CACHE.glob(f"vllm-{VERSION}-*.whl"))
        assert kept, f"pip did not download vllm=={VERSION}:\n{done.stderr[-2000:]}"
    return kept[0]


@pytest.mark.nightly
def test_the_newest_vllm_has_every_fact_that_the_connector_relies_on() -> None:
    path = wheel()
    changed = differences(facts_of(open_tree(path)), MANIFEST.read_text())
    assert not changed, "\n".join(
        [
            f"{path.name} differs from what the connector was last held against ({MANIFEST.name}); where it is right,",
            f"`python -m tests.support.vllm_connector.interface {path} --write` says so:",
            *changed,
        ]
    )


BASE = """
class KVConnectorBase_V1(ABC):
    @property
    def role(self) -> int: ...
    def request_finished(self, request: "Request", block_ids: list[int], *, more: int = 3) -> tuple: ...
"""
SCHEDULER = """
class Scheduler:
    def _free(self, request):
        if self.connector is not None:
            self.connector.request_finished(request, self.ids(request))
        self.other.request_finished(request)
"""


def tree(directory: pathlib.Path, base: str = BASE, scheduler: str = SCHEDULER) -> pathlib.Path:
    for path, text in (
        ("distributed/kv_transfer/kv_connector/v1/base.py", base),
        ("v1/core/sched/scheduler.py", scheduler),
    ):
        file = directory / "vllm" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return directory


def test_facts_are_signatures_and_calls_without_annotations(tmp_path: pathlib.Path) -> None:
    lines = lines_of(facts_of(DirectoryTree(tree(tmp_path))))
    assert "KVConnectorBase_V1.role: @property (self)" in lines
    assert "KVConnectorBase_V1.request_finished: (self, request, block_ids, *, more=3)" in lines
    assert "v1/core/sched/scheduler.py _free: request_finished(request, self.ids(request))" in lines
    assert "SupportsHMA: MISSING" in lines
    assert "VllmConfig.cache_config: MISSING" in lines


def test_a_wheel_is_read_as_a_directory_is(tmp_path: pathlib.Path) -> None:
    directory = tree(tmp_path / "site")
    with zipfile.ZipFile(tmp_path / "vllm-9-py3-none-any.whl", "w") as archive:
        for file in directory.rglob("*.py"):
            archive.write(file, str(file.relative_to(directory)))
    wheel = open_tree(tmp_path / "vllm-9-py3-none-any.whl")
    assert facts_of(wheel) == facts_of(open_tree(directory))


@pytest.mark.parametrize(
    ("base", "scheduler", "named"),
    [
        (
            BASE.replace("block_ids", "blocks"),
            SCHEDULER,
            "KVConnectorBase_V1.request_finished: (self, request, blocks, ",
        ),
        (BASE.replace("request_finished", "request_ended"), SCHEDULER, "KVConnectorBase_V1.request_ended"),
        (
            BASE.replace("    @property", "    @property\n    def new(self): ...\n    @property"),
            SCHEDULER,
            "KVConnectorBase_V1.new",
        ),
        (BASE, SCHEDULER.replace("self.ids(request)", "[]"), "scheduler.py _free: request_finished(request, [])"),
        (BASE, SCHEDULER.replace("_free", "_finish"), "scheduler.py _finish: request_finished("),
    ],
    ids=["a parameter", "a name", "a new method", "an argument", "a caller"],
)
def test_a_difference_is_named(tmp_path: pathlib.Path, base: str, scheduler: str, named: str) -> None:
    manifest = "\n".join(lines_of(facts_of(DirectoryTree(tree(tmp_path / "before")))))
    assert differences(facts_of(DirectoryTree(tree(tmp_path / "before"))), manifest) == []
    changed = differences(facts_of(DirectoryTree(tree(tmp_path / "after", base, scheduler))), manifest)
    assert any(line.startswith("+ ") and named in line for line in changed), changed


def test_the_manifest_has_nothing_missing() -> None:
    lines = MANIFEST.read_text().splitlines()
    assert [line for line in lines if line.endswith("MISSING")] == []
    assert len(lines) > 200


def test_every_method_of_the_connector_is_one_that_the_manifest_knows(root: pathlib.Path) -> None:
    """Of the class that vLLM loads, without vLLM: a method that vLLM does not know is never called."""
    text = (root / "kvxfer" / "connectors" / "vllm" / "connector.py").read_text()
    (connector,) = (
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) and node.name == "KvxferConnector"
    )
    methods = {node.name for node in connector.body if isinstance(node, ast.FunctionDef)}
    known = {
        line.partition(":")[0].partition(".")[2]
        for line in MANIFEST.read_text().splitlines()
        if line.startswith(("KVConnectorBase_V1.", "SupportsHMA."))
    }
    assert methods - known - {"_scheduler", "_worker", "worker_half", "_take_results", "_know_ranks"} == set()
