"""``kvxfer serve`` for programs, with engines without a model: one ready line, all of it ended, losses said."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cli.processes import is_running, wait_gone

COMMAND = [sys.executable, "-P", "-m", "kvxfer.cli", "serve"]
PACE = "--ttft-ms 0 --itl-ms 0"


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    command = [*COMMAND, f"--mock={PACE}", "--port=0", "--ready-json", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=30)[1]
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate(timeout=30)


def ask(url: str, model: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        body = json.dumps({"model": model, "prompt": [1, 2, 3], "max_tokens": 4})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("kind", ["any", "vllm", "sglang"])
def test_a_program_starts_uses_and_ends_it(kind: str) -> None:
    with serving(f"--mock={PACE} --kind {kind}", "--prefill=2", "--decode=3") as (process, ready):
        assert ready["event"] == "ready"
        assert ready["model"] == "mock"
        assert ready["pid"] == process.pid
        roles = {each["role"]: each for each in ready["processes"]}
        assert set(roles) == {"mock-engine", "router"}
        assert [each["role"] for each in roles["mock-engine"]["engines"]] == ["prefill"] * 2 + ["decode"] * 3
        status, headers, content = ask(ready["url"], "mock")
        assert status == 200, content
        assert headers["x-kvxfer-prefill"] == "remote"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert output == "", "the ready line is alone on stdout"
        assert "router" in errors
        wait_gone([each["pid"] for each in ready["processes"]])


def test_a_policy_reaches_the_router_and_no_prefill_worker_is_needed() -> None:
    with serving("--prefill=0", "--decode=1", "--policy=local-prefill=on+min-remote-prefill-tokens=9") as (_, ready):
        status, headers, content = ask(ready["url"], "mock")
        assert status == 200, content
        assert headers["x-kvxfer-prefill"] == "local"


def test_a_killed_child_is_reported() -> None:
    with serving() as (process, ready):
        os.kill(ready["processes"][0]["pid"], signal.SIGKILL)
        assert process.stderr is not None
        while "lost mock-engine" not in (line := process.stderr.readline()):
            assert line, "it ended without a word"
        assert "SIGKILL" in line
        assert process.poll() is None


def test_log_lines_go_to_files(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "logs"
    with serving(f"--log-dir={directory}") as (process, ready):
        os.kill(ready["processes"][0]["pid"], signal.SIGKILL)
        status, _, _ = ask(ready["url"], "mock")
        assert status >= 500
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        assert "[router]" not in errors
    assert (directory / "router.log").read_text()


def test_nothing_outlives_a_killed_parent() -> None:
    with serving() as (process, ready):
        pids = [each["pid"] for each in ready["processes"]]
        assert all(map(is_running, pids))
        process.kill()
        wait_gone(pids)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--mock=--ttft 5"], "--mock: unrecognized arguments: --ttft 5"),
        (["--mock=--count 5"], "--mock: --count follows from --prefill and --decode"),
        (["--mock=--ttft-ms -5"], "ttft_ms must be 0 or more, not -5.0"),
        (["--mock='"], "--mock: No closing quotation"),
        (["--mock=", "--policy=fast"], "policy: 'fast' is not NAME=VALUE with one of the names local-prefill, "),
        (["--mock=", "--lanes=stream"], "lanes are of the built-in engine's workers; mock engines have none"),
    ],
)
def test_wrong_flags_are_said_in_a_sentence(flags: list[str], said: str) -> None:
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"kvxfer: {said}")
    assert done.stdout == ""


def test_a_setting_that_the_router_refuses_is_said() -> None:
    command = [*COMMAND, "--mock=", "--port=0", "--ready-json", "--policy=local-prefill=maybe"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("kvxfer: router could not start: ")
    assert done.stdout == ""
