"""NIXL's own Python tests and examples on host memory, unchanged, under ``kvxfer nixl``: the verdicts of docs/nixl.md.

``KVXFER_NIXL_SOURCE`` names a checkout of NIXL's repository; nothing is written there.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator

import pytest

from tests.support.nixl.agents import held_port, until

SOURCE = os.environ.get("KVXFER_NIXL_SOURCE", "")
TESTS, EXAMPLES = pathlib.Path(SOURCE, "test/python"), pathlib.Path(SOURCE, "examples/python")
HOST = "127.0.0.1"
SKIPPED = {"test_instantiate_all", "test_incorrect_plugin_env", "test_prep_mem_view", "test_query_mem"}
WANT_NONE = {"test_improper_get_xfer_descs", "test_improper_get_reg_descs", "test_noncontiguous_tensor"}

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.no_sanitizer,
    pytest.mark.skipif(not SOURCE, reason="KVXFER_NIXL_SOURCE names no checkout of NIXL's repository"),
]


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    pytest.importorskip("torch", reason="NIXL's tests and examples make tensors")


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "kvxfer.cli", "nixl", "--", sys.executable, *map(str, words)]


def run(*words: object, code: int = 0, environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command(*words), env={**os.environ, **(environ or {})}, capture_output=True, text=True, timeout=200
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextlib.contextmanager
def target(script: pathlib.Path, log: pathlib.Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """One that listens where it likes, and says where on stderr: so NIXL's own CI starts it."""
    words = command(script, "--mode=target", f"--ip={HOST}", "--port=0")
    with log.open("wb") as file:
        process = subprocess.Popen(words, env={**os.environ, "NIXL_LOG_LEVEL": "INFO"}, stderr=file)
    try:
        found = until(lambda: re.search(r"MD listener is listening on port (\d+)", log.read_text()))
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("backend", ["UCX", "LIBFABRIC"])
@pytest.mark.parametrize(("bad_input", "failed"), [("", set()), ("raise", WANT_NONE)])
def test_their_tests(backend: str, bad_input: str, failed: set[str]) -> None:
    run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=verdicts.xml"),
        *("--backend", backend, TESTS),
        code=1 if failed else 0,
        environ={"KVXFER_NIXL_BAD_INPUT": bad_input},
    )
    verdicts: dict[str, set[str]] = {"passed": set(), "failure": set(), "skipped": set(), "error": set()}
    for case in ET.parse("verdicts.xml").iter("testcase"):
        kind = next((child.tag for child in case if child.tag in verdicts), "passed")
        verdicts[kind].add(case.attrib["name"])
    assert (verdicts["failure"], verdicts["skipped"], verdicts["error"]) == (failed, SKIPPED, set())
    assert len(verdicts["passed"]) + len(failed) >= 23


@pytest.mark.parametrize("words", [("desc_perf.py",), ("prep_xfer_perf.py", "list"), ("prep_xfer_perf.py", "array")])
def test_their_measurements(words: tuple[str, ...]) -> None:
    run(TESTS / words[0], *words[1:])


@pytest.mark.parametrize("name", ["basic_two_peers.py", "expanded_two_peers.py"])
def test_two_peers(name: str, tmp_path: pathlib.Path) -> None:
    with target(EXAMPLES / name, tmp_path / "log") as (process, port):
        telemetry = {"NIXL_TELEMETRY_ENABLE": "y", "NIXL_TELEMETRY_DIR": str(tmp_path)}
        run(EXAMPLES / name, "--mode=initiator", f"--ip={HOST}", f"--port={port}", environ=telemetry)
        assert process.wait(60) == 0
    words = command(EXAMPLES / "telemetry_reader.py", "--telemetry_path", tmp_path / "initiator")
    said = tmp_path / "said"
    with said.open("wb") as file:
        reader = subprocess.Popen(words, stderr=file)
    try:
        until(lambda: "Event: agent_memory_deregistered" in said.read_text())
        reader.send_signal(signal.SIGINT)
        assert reader.wait(60) == 0
        assert "Total events read" in said.read_text()
    finally:
        reader.kill()
        reader.wait()


def test_partial_metadata() -> None:
    """The variable is there for the example to delete: it fails where it is not, on NIXL too."""
    example = EXAMPLES / "partial_md_example.py"
    with held_port() as one, held_port() as other:
        words = ("--init-port", one, "--target-port", other)
        assert "Test Complete" in run(example, *words, environ={"NIXL_ETCD_ENDPOINTS": "unused"})
        assert "KeyError: 'NIXL_ETCD_ENDPOINTS'" in run(example, *words, code=1)


def test_storage_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    assert 'assert "GDS" in plugin_list' in run(EXAMPLES / "nixl_gds_example.py", tmp_path / "file", code=1)
    said = run(EXAMPLES / "query_mem_example.py", code=1)
    assert "nixlNotFoundError: plugin 'POSIX' is for files" in said
    example = EXAMPLES / "remote_storage_example/nixl_p2p_storage_example.py"
    words = ("--role", "server", "--name", "one", "--port", "0", "--fileprefix", tmp_path / "file")
    assert "No storage backends available, exiting" in run(example, *words, code=255)
