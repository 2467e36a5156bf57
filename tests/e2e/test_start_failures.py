"""A process that cannot start says why in one sentence, with an exit code, and leaves nothing half-written."""

from __future__ import annotations

import errno
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

COMMAND = [sys.executable, "-P", "-m", "kvxfer.cli"]
RUN_S = 90
LIMIT_BYTES = 64 << 10
"""Less than the weights of the model ``tiny``."""
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def run(words: Sequence[str], *, file_bytes_max: int | None = None, **environment: str) -> tuple[int, str]:
    """Exit code and last line; nothing on stdout, no traceback."""
    limits = [] if file_bytes_max is None else [sys.executable, "-c", LIMITED, str(file_bytes_max)]
    done = subprocess.run(
        [*limits, *COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        env={**os.environ, **environment},
    )
    assert not done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("kvxfer: ")]
    assert len(said) == 1, done.stderr
    return done.returncode, said[0]


def test_port_taken(taken_port: int, tmp_path: pathlib.Path, tiny_model: pathlib.Path) -> None:
    token = f"--token-file={tmp_path / 'token'}"
    for words in (
        ["coordinator", token],
        ["worker", f"--model={tiny_model}"],
        ["router", token, "--coordinator=127.0.0.1:9"],
    ):
        code, said = run([*words, f"--port={taken_port}"])
        assert code == 2
        assert str(taken_port) in said
        assert "listen" in said or "in use" in said


def test_model_missing(tmp_path: pathlib.Path) -> None:
    code, said = run(["worker", f"--model={tmp_path / 'nowhere'}"])
    assert code == 2
    assert "nowhere" in said
    (tmp_path / "empty").mkdir()
    code, said = run(["model", str(tmp_path / "empty")])
    assert code == 2
    assert "config.json" in said


def test_weights_cut_short(tmp_path: pathlib.Path, tiny_model: pathlib.Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    code, said = run(["worker", f"--model={broken}"])
    assert code == 2
    assert str(broken) in said


def test_no_room_for_the_model(tmp_path: pathlib.Path) -> None:
    """Files may not grow past a bound, as on a disk that fills up: nothing of the model stays."""
    code, said = run(["model", "tiny"], file_bytes_max=LIMIT_BYTES, XDG_CACHE_HOME=str(tmp_path))
    assert code == 2
    assert "building tiny" in said
    assert os.strerror(errno.EFBIG) in said
    models = tmp_path / "kvxfer" / "models"
    assert [path.name for path in models.iterdir() if path.is_dir()] == []


def test_router_told_nonsense(tmp_path: pathlib.Path) -> None:
    token = tmp_path / "token"
    code, said = run(["router", f"--token-file={token}", "--coordinator=127.0.0.1:9", "--api-key-file=/nowhere"])
    assert code == 2
    assert "/nowhere" in said
    code, said = run(["router", f"--token-file={token}"])
    assert code == 2
    assert "coordinator" in said
