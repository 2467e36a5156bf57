"""`make demo-sglang` without SGLang: what it says of wrong flags and failed servers, and that nothing of it is left."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.support import child

pytestmark = pytest.mark.checkout

FAKE = child.ROOT / "tests" / "support" / "cli" / "fake_sglang.py"
END_S = 60.0


class Demo:
    """It runs with a stand-in for SGLang's Python."""

    def __init__(self, directory: pathlib.Path, *flags: str, **environment: str) -> None:
        python = directory / "venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
        python.chmod(0o755)
        model = directory / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        self.mark = f"DEMO_MARK={directory}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.sglang.demo", f"--model={model}", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child.environment(SGLANG_VENV=str(directory / "venv"), TMPDIR=str(directory), DEMO_MARK=str(directory))
            | environment,
        )

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=END_S)
        assert not self.left(), "it left processes behind"
        return self.process.returncode, out, err

    def left(self) -> list[int]:
        """Processes that it started, and itself."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:  # it ended meanwhile, or is another user's
                continue
        return found


def test_it_says_what_moved_and_that_the_tokens_are_the_same(tmp_path: pathlib.Path) -> None:
    code, out, err = Demo(tmp_path, "--tokens=70").end()
    assert (code, err) == (0, "")
    for name in ("prefill", "decode", "one", "router"):
        assert f"  {name:<8}ready after " in out
    for length in (1, 11, 70):
        assert f"A prompt of {length} token{'s' * (length > 1)} through the router, " in out
    moved = "Moved: 524288 bytes, 1024 of them while the prompt was still computed (2 by cma, 1 by unix)."
    assert out.endswith(f"{moved}\nToken for token the same.\n")
    assert not list(tmp_path.glob("kvxfer-*")), "logs are kept where something failed"


@pytest.mark.parametrize("name", ["decode", "router"])
def test_one_that_does_not_start_is_named_with_its_log(tmp_path: pathlib.Path, name: str) -> None:
    code, _, err = Demo(tmp_path, FAKE_DIES=name).end()
    assert code == 1
    [directory] = tmp_path.glob("kvxfer-demo-sglang-*")
    said = f"demo-sglang: {name} ended with code 1 before it was ready; its log is {directory}/{name}.log"
    assert err.startswith(f"{said}\n  {name} begins\n  no such device\n")
    assert f"The logs of all processes are kept in {directory}" in err


def test_other_tokens_are_told_of(tmp_path: pathlib.Path) -> None:
    code, out, _ = Demo(tmp_path, FAKE_LIES="router").end()
    assert code == 1
    assert out.endswith("NOT the same.\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_can_be_interrupted_while_it_starts(tmp_path: pathlib.Path, number: int) -> None:
    demo = Demo(tmp_path, FAKE_HANGS="decode")
    begun_s = time.monotonic()
    while len(demo.left()) < 4:  # itself, and three servers
        assert time.monotonic() - begun_s < END_S
        time.sleep(0.02)
    demo.process.send_signal(number)
    code, _, err = demo.end()
    assert code == 130
    assert err == "demo-sglang: interrupted; all processes are ended\n"


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--tokens=0", "argument --tokens: must be a whole number from 1 to 4000, not '0'"),
        ("--tokens=many", "argument --tokens: must be a whole number from 1 to 4000, not 'many'"),
        ("--model=/nowhere", "argument --model: '/nowhere' is no directory of a model: it has no config.json"),
        ("--lane=ucx", "unrecognized arguments: --lane=ucx"),
    ],
)
def test_a_wrong_flag_gets_a_sentence(tmp_path: pathlib.Path, flag: str, said: str) -> None:
    code, out, err = Demo(tmp_path, flag).end()
    assert (code, out) == (2, "")
    assert err.endswith(f"demo-sglang: error: {said}\n")
