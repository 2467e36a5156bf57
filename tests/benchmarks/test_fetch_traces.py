"""benchmarks/fetch_traces.py: only the right file gets its name, and what fails is one sentence."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvxfer.workload.published import PUBLISHED
from tests.support.child import environment

pytestmark = pytest.mark.checkout

PROGRAM = pathlib.Path(__file__).parents[2] / "benchmarks" / "fetch_traces.py"
CUT = pathlib.Path(__file__).parents[1] / "workload" / "traces" / "azure_2023_conversation_200.csv"
WHOLE = "good.csv"
CALL = """
import dataclasses, runpy, sys
import kvxfer.workload.published as published
program, size, digest = sys.argv[1], int(sys.argv[2]), sys.argv[3]
one = published.PublishedTrace("good.csv", "http://127.0.0.1:1/none", digest, size or None, "a test, CC0")
published.PUBLISHED = (one, dataclasses.replace(one, name="other.csv"))
sys.argv = [program, *sys.argv[4:]]
runpy.run_path(program, run_name="__main__")
"""
"""The program with traces of its own, so that a test need not send megabytes."""


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.startswith("/short/"):
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            self.wfile.write(b"a beginning")
            return
        super().do_GET()


@contextlib.contextmanager
def served(folder: pathlib.Path) -> Iterator[str]:
    def handler(*arguments: object) -> QuietHandler:
        return QuietHandler(*arguments, directory=str(folder))  # type: ignore[arg-type]

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:  # type: ignore[arg-type]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def ran(*arguments: str | pathlib.Path, size: int | None = None) -> subprocess.CompletedProcess[str]:
    digest = hashlib.sha256(CUT.read_bytes()).hexdigest()
    size = CUT.stat().st_size if size is None else size
    command = [sys.executable, "-c", CALL, str(PROGRAM), str(size), digest, *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def source(tmp_path: pathlib.Path) -> Iterator[str]:
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / WHOLE).write_bytes(CUT.read_bytes())
    (folder / "other.csv").write_bytes(CUT.read_bytes().replace(b"374", b"375"))
    with served(folder) as url:
        yield url


@pytest.mark.parametrize("size", [None, 0])
def test_the_right_file_gets_its_name_and_is_kept(source: str, tmp_path: pathlib.Path, size: int | None) -> None:
    into = tmp_path / "new" / "traces"
    first = ran(into, WHOLE, "--base-url", source, size=size)
    assert (first.returncode, first.stderr) == (0, "")
    assert "a test, CC0" in first.stdout
    assert (into / WHOLE).read_bytes() == CUT.read_bytes()
    again = ran(into, WHOLE, size=size)
    assert again.returncode == 0
    assert "is there already" in again.stdout
    assert [path.name for path in into.iterdir()] == [WHOLE]


def test_a_wrong_file_leaves_nothing_and_the_others_are_fetched(source: str, tmp_path: pathlib.Path) -> None:
    into = tmp_path / "traces"
    done = ran(into, "other.csv", WHOLE, "--base-url", source)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "gave SHA-256" in done.stderr
    assert [path.name for path in into.iterdir()] == [WHOLE]


@pytest.mark.parametrize(
    ("place", "size", "said"),
    [
        ("/nothing", None, "answered 404"),
        ("/short", None, "gave 11 bytes, and good.csv has"),
        ("", 100, "has more than the 100 bytes of good.csv"),
        ("", 10_000_000, "bytes, and good.csv has 10000000"),
    ],
)
def test_what_fails_is_one_sentence(
    source: str, tmp_path: pathlib.Path, place: str, size: int | None, said: str
) -> None:
    done = ran(tmp_path / "traces", WHOLE, "--base-url", source + place, size=size)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert list((tmp_path / "traces").iterdir()) == []


def test_a_server_that_is_not_there_is_one_sentence(tmp_path: pathlib.Path) -> None:
    done = ran(tmp_path / "traces", WHOLE)
    assert done.returncode == 1
    assert "cannot be reached" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_name_that_no_trace_has_is_one_sentence(tmp_path: pathlib.Path) -> None:
    done = ran(tmp_path / "traces", "what.csv")
    assert done.returncode == 2
    assert "no trace is named what.csv" in done.stderr


def test_the_list_has_every_published_trace_with_its_licence() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--list"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for trace in PUBLISHED:
        assert trace.name in done.stdout
        assert trace.url in done.stdout
        assert trace.source.rpartition(", ")[2] in ("Apache-2.0", "CC-BY-4.0")
        assert len(trace.sha256) == 64
        assert trace.url.startswith("https://raw.githubusercontent.com/")
