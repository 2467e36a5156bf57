"""Every command on hosts that give it little: it serves, or says in one sentence which setting to set."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.support.restricted import NOT_APPLICABLE, Restrictions, restricted

ANYBODY = 54321
"""A user id without passwd entry."""
WITHOUT_UCX = "mapped,cma,unix,stream"
"""Loading UCX takes a second; hosts that may matter to it have all lanes."""
NO_PIDFD = {"pidfd_open": errno.EPERM, "getsockopt": errno.ENOPROTOOPT}
HOSTS = {
    "no-user": Restrictions(user_id=ANYBODY),
    "read-only": Restrictions(is_read_only=True),
    "small-shm": Restrictions(shm_bytes=65536),
    "powerless": Restrictions(has_capabilities=False),
    "no-memfd": Restrictions(forbidden={"memfd_create": errno.EPERM}),
    "no-readv": Restrictions(forbidden={"process_vm_readv": errno.ENOSYS}),
    "no-pidfd": Restrictions(forbidden=NO_PIDFD),
    "few-files": Restrictions(open_files=64),
}
EVERYTHING_AT_ONCE = Restrictions(
    user_id=ANYBODY,
    is_read_only=True,
    shm_bytes=65536,
    open_files=64,
    has_capabilities=False,
    forbidden={"memfd_create": errno.EPERM, "process_vm_readv": errno.EPERM, **NO_PIDFD},
)
TOKEN = "there is no place for the cluster token: .*; set KVXFER_TOKEN_FILE, XDG_STATE_HOME or HOME"
MODELS = "there is no place for models: .*; set XDG_CACHE_HOME or HOME"
HUB = "there is no place for models of the hub: .*; set HF_HOME, XDG_CACHE_HOME or HOME"
TOKEN_READ_ONLY = (
    "cluster token file .* cannot be made: Read-only file system; KVXFER_TOKEN_FILE, XDG_STATE_HOME or HOME "
)
MODELS_READ_ONLY = "building tiny in .* failed: Read-only file system; XDG_CACHE_HOME or HOME names another place"
NO_SOCKET = (
    "there is no place for a Unix socket: no temporary directory can be written .*; set XDG_RUNTIME_DIR or TMPDIR"
)

ENDS = [
    ("no-user", "version", 0, "kvxfer "),
    ("no-user", "--help", 0, "usage: kvxfer"),
    ("no-user", "nixl -- /bin/true", 0, ""),
    ("no-user", "model --list", 2, MODELS),
    ("no-user", "model tiny", 2, MODELS),
    ("no-user", "coordinator --port=0", 2, TOKEN),
    ("no-user", "router --coordinator=127.0.0.1:1", 2, TOKEN),
    ("no-user", "serve --port=0 --model=tiny", 2, MODELS),
    ("no-user", "demo --model=tiny", 2, MODELS),
    ("no-user", "demo --model=some/model", 2, HUB),
    (
        "no-user",
        "demo --model=~/model",
        2,
        "~/model: user id 54321 has no home directory; set HOME, or write the whole path",
    ),
    ("no-user", "doctor", 0, "cluster token +no +" + TOKEN),
    ("no-user", "doctor", 0, "models +no +" + MODELS),
    ("read-only", "version", 0, "kvxfer "),
    ("read-only", "nixl -- /bin/true", 0, ""),
    ("read-only", "model --list", 0, "no models in /nowhere/.cache/kvxfer/models"),
    ("read-only", "model tiny", 2, MODELS_READ_ONLY),
    ("read-only", "coordinator --port=0", 2, TOKEN_READ_ONLY),
    ("read-only", "router --coordinator=127.0.0.1:1", 2, TOKEN_READ_ONLY),
    ("read-only", "serve --port=0 --model=tiny", 2, MODELS_READ_ONLY),
    ("read-only", "demo --model=tiny", 2, MODELS_READ_ONLY),
    ("read-only", "doctor", 0, f"mapped +no +{NO_SOCKET}\n +cma +no .*\n +ucx .*\n +unix +no +{NO_SOCKET}"),
    (
        "read-only",
        "doctor",
        0,
        r"stream +yes (.*\n)+files\n +cluster token +no +/nowhere/.*; KVXFER_TOKEN_FILE",
    ),
    ("small-shm", "doctor", 0, r"mapped +yes .*\n +cma .*\n +ucx .*\n +unix +yes .*\n +stream +yes"),
    ("powerless", "doctor", 0, r"mapped +yes .*\n +cma .*\n +ucx .*\n +unix +yes .*\n +stream +yes"),
    (
        "no-memfd",
        "doctor",
        0,
        r"mapped +no +memfd_create: Operation not permitted \(a seccomp profile has to ",
    ),
    ("no-readv", "doctor", 0, "cma +no +process_vm_readv is not to be had: .* a seccomp profile that has to allow it"),
    ("no-pidfd", "doctor", 0, "cma +no +pidfd_open is not to be had .* a seccomp profile that has to allow it"),
    ("few-files", "doctor", 0, r"open files +no +64, up to 64 \(ulimit -n\)"),
]
SERVES = [
    *(("coordinator --port=0", host) for host in HOSTS),
    *(("router --coordinator=127.0.0.1:1 --port=0", host) for host in ("no-user", "read-only", "few-files")),
]
WORKERS = [
    *(("worker --port=0 --model=tiny", host) for host in ("no-user", "read-only", "few-files")),
    ("serve --port=0 --model=tiny", "few-files"),
]


def command_on(host: Restrictions, words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        restricted([sys.executable, "-P", "-m", "kvxfer.cli", *words], host),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env={
            "PATH": os.defpath,
            "PYTHONDONTWRITEBYTECODE": "1",
            "KVXFER_LANES": "mapped,cma,unix,stream",
            **environment,
        },
    )


def skip_where_not_applicable(code: int | None, errors: str) -> None:
    if code == NOT_APPLICABLE:
        pytest.skip(f"this host does not let itself be restricted so: {errors.strip()}")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with a token and a model, made before anything is restricted."""
    directory = tmp_path_factory.mktemp("filled")
    environment = {"XDG_STATE_HOME": str(directory), "XDG_CACHE_HOME": str(directory)}
    code = "from kvxfer.rpc import token; token.load_or_create_token(token.default_token_path())"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, check=True)
    return environment


@pytest.fixture(scope="module")
def filled_with_model(filled: dict[str, str]) -> dict[str, str]:
    words = [sys.executable, "-P", "-m", "kvxfer.cli", "model", "tiny"]
    subprocess.run(words, env={**os.environ, **filled}, check=True, capture_output=True)
    return filled


@pytest.mark.parametrize(("host", "words", "code", "sentence"), ENDS, ids=lambda value: str(value)[:40])
def test_a_command_on_a_restricted_host_ends_with_one_sentence(host: str, words: str, code: int, sentence: str) -> None:
    home = {} if host == "no-user" else {"HOME": "/nowhere"}
    if words == "doctor" and host in ("read-only", "small-shm", "powerless"):
        home["KVXFER_LANES"] = ""
    process = command_on(HOSTS[host], words.split(), home)
    output, errors = process.communicate(timeout=60)
    skip_where_not_applicable(process.returncode, errors)
    assert "Traceback" not in output + errors
    assert process.returncode == code, output + errors
    if code:
        assert re.fullmatch(f"(  .*\n)*kvxfer: {sentence}.*\n", errors), errors
        assert output == ""
    else:
        assert re.search(sentence, output), output


def serve_until_stopped(words: str, host: Restrictions, environment: dict[str, str], is_ready: Any) -> None:
    process = command_on(host, words.split(), environment)
    try:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if is_ready(line):
                process.send_signal(signal.SIGTERM)
                break
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    skip_where_not_applicable(process.returncode, errors)
    assert process.returncode == 0, "".join(lines) + output + errors
    assert "Traceback" not in errors


def is_ready_line(line: str) -> bool:
    return line.startswith("{") and json.loads(line)["event"] == "ready"


@pytest.mark.parametrize(("words", "host"), SERVES)
def test_a_service_on_a_restricted_host_becomes_ready(words: str, host: str, filled: dict[str, str]) -> None:
    serve_until_stopped(words, HOSTS[host], filled, is_ready_line)


@pytest.mark.nightly
@pytest.mark.parametrize(("words", "host"), WORKERS)
def test_a_worker_on_a_restricted_host_becomes_ready(words: str, host: str, filled_with_model: dict[str, str]) -> None:
    serve_until_stopped(
        words, HOSTS[host], filled_with_model, lambda line: line == "Ctrl-C stops all of it.\n" or is_ready_line(line)
    )


@pytest.mark.nightly
def test_the_demo_compares_equal_where_everything_is_missing_at_once(filled_with_model: dict[str, str]) -> None:
    """Nothing can be written, shared, read out of another process or held on to: the stream lane needs none of it."""
    words = ["demo", "--model=tiny", "--max-tokens=8", "--verbose"]
    process = command_on(EVERYTHING_AT_ONCE, words, filled_with_model)
    output, errors = process.communicate(timeout=240)
    skip_where_not_applicable(process.returncode, errors)
    assert process.returncode == 0, output + errors
    assert "tokens are identical" in output
    assert re.search(
        r"lane +stream: the source is reached over TCP \(not mapped: the source listens on no Unix", output
    )
    assert re.search("memory is private to this process, so lane mapped cannot carry it: memfd_create: ", errors)
    assert "Traceback" not in errors


NIXL_READS = """
import time
import numpy as np
from nixl._api import nixl_agent

source, reader = nixl_agent("source"), nixl_agent("reader")
theirs, ours = np.full(65536, 7, np.uint8), np.zeros(65536, np.uint8)
for agent, array in ((source, theirs), (reader, ours)):
    agent.register_memory([(array.ctypes.data, array.nbytes, 0, "")], "DRAM")
name = reader.add_remote_agent(source.get_agent_metadata())
rows = [reader.get_xfer_descs([(array.ctypes.data, array.nbytes, 0)], "DRAM") for array in (ours, theirs)]
handle = reader.initialize_xfer("READ", *rows, name)
state = reader.transfer(handle)
while state == "PROC":
    time.sleep(0.001)
    state = reader.check_xfer_state(handle)
print(state, bool((ours == 7).all()))
"""


@pytest.mark.parametrize("host", ["no-user", "read-only", "powerless", "no-memfd", "no-readv", "no-pidfd", "few-files"])
def test_a_program_of_nixl_on_a_restricted_host_reads(host: str) -> None:
    process = command_on(HOSTS[host], ["nixl", "--", sys.executable, "-c", NIXL_READS], {})
    output, errors = process.communicate(timeout=60)
    skip_where_not_applicable(process.returncode, errors)
    assert output == "DONE True\n", errors
    assert "Traceback" not in errors


def test_a_directory_is_not_made_for_a_home_that_is_not_known(tmp_path: pathlib.Path) -> None:
    """``~`` in a path of a program that does not find a home becomes a directory of that name."""
    words = [sys.executable, "-P", "-m", "kvxfer.cli", "demo", "--model=some/model"]
    host = HOSTS["no-user"]
    done = subprocess.run(
        restricted(words, host), cwd=tmp_path, env={"PATH": os.defpath}, capture_output=True, text=True
    )
    skip_where_not_applicable(done.returncode, done.stderr)
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []
