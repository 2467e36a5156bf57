"""One sentence and the right exit code for everything that ends a command."""

from __future__ import annotations

import builtins
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

import kvxfer
from kvxfer import cli
from kvxfer.cli import doctor, services
from kvxfer.cli.flags import flag_name
from kvxfer.errors import ConfigError, PeerGoneError


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"kvxfer {kvxfer.__version__}\n"


def test_version_as_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"kvxfer {kvxfer.__version__}\n"


@pytest.mark.parametrize("command", ["doctor", "router"])
@pytest.mark.parametrize("address", ["nonsense", "host:", ":7400", "host:x", "host:70000", "host:" + "9" * 5000])
def test_a_coordinator_is_host_and_port(command: str, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, f"--coordinator={address}"]) == 2
    assert capsys.readouterr().err == f"kvxfer: coordinator must be host:port, not {address!r:.100}\n"


@pytest.mark.parametrize("words", [[], ["nothing"], ["doctor", "--nothing"], ["coordinator", "--port", "x"]])
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (ConfigError("port must be 0"), 2, "port must be 0"),
        (PeerGoneError("prefill-0 is\n  gone"), 1, "prefill-0 is gone"),
        (FileNotFoundError(2, "No such file or directory", "/nowhere"), 1, "/nowhere: No such file or directory"),
        (
            ImportError("No module named 'torch'", name="torch"),
            1,
            "torch is not installed; pip install 'kvxfer[engine]'",
        ),
        (
            ImportError("No module named 'x'", name="uvicorn.x"),
            1,
            "uvicorn is not installed; pip install 'kvxfer[router]'",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_failures(
    error: BaseException, code: int, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(args: object) -> int:
        raise error

    monkeypatch.setattr(doctor, "run", broken)
    assert cli.main(["doctor"]) == code
    text = capsys.readouterr().err
    assert text.startswith(f"kvxfer: {sentence}")
    assert text.count("\n") == 1


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: object) -> int:
        raise ImportError("No module named 'kvxfer.nothing'", name="kvxfer.nothing")

    monkeypatch.setattr(doctor, "run", broken)
    with pytest.raises(ImportError):
        cli.main(["doctor"])


@pytest.mark.parametrize("command", sorted(services.SERVICES))
def test_every_option_is_a_flag_with_help(command: str) -> None:
    help_text = cli.build_parser(command)._subparsers._group_actions[0].choices[command].format_help()  # type: ignore
    options: Any = services.options_class(command)
    for field in options.__dataclass_fields__.values():
        assert flag_name(field.name) in help_text
        assert field.metadata.get("help"), f"{options.__name__}.{field.name} has no help"


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_help_needs_no_extra(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real_import = builtins.__import__
    missing = {"torch", "transformers", "fastapi", "uvicorn", "httpx", "pydantic"}

    def guarded(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert "usage: kvxfer" in capsys.readouterr().out


def coordinator(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "kvxfer.cli", "coordinator", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_service_is_ready_and_stops_cleanly(number: signal.Signals, tmp_path: pathlib.Path) -> None:
    process = coordinator("--port=0", f"--token-file={tmp_path / 'token'}")
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["event"] == "ready"
        assert ready["role"] == "coordinator"
        assert ready["pid"] == process.pid
        with socket.create_connection((ready["address"].rpartition(":")[0], int(ready["address"].rpartition(":")[2]))):
            pass
        process.send_signal(number)
        rest, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert rest == ""
    assert "Traceback" not in errors
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_port_taken_is_one_sentence(tmp_path: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        process = coordinator(f"--port={port}", f"--token-file={tmp_path / 'token'}")
        out, errors = process.communicate(timeout=60)
    assert process.returncode in (1, 2)
    assert out == ""
    sentences = [line for line in errors.splitlines() if line.startswith("kvxfer: ")]
    assert len(sentences) == 1, errors
    assert str(port) in sentences[0]
    assert "Traceback" not in errors


def test_beyond_loopback_needs_consent(tmp_path: pathlib.Path) -> None:
    process = coordinator("--host=0.0.0.0", f"--token-file={tmp_path / 'token'}")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "not loopback" in errors
    assert not (tmp_path / "token").exists()


def test_a_process_that_is_not_the_parent_is_refused() -> None:
    process = coordinator("--exit-with-parent=1" if os.getpid() != 1 else "--exit-with-parent=2")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "is not its parent" in errors
