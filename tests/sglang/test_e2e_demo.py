"""`make demo-sglang` with real SGLang: it does the page, and leaves nothing behind (`make test-sglang-e2e`)."""

from __future__ import annotations

import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

import psutil
import pytest

from tests.support import child

pytestmark = pytest.mark.timeout(900)

END_S = 400.0


@pytest.fixture
def directory() -> Iterator[pathlib.Path]:
    """Sockets are made in it, whose paths are limited."""
    with tempfile.TemporaryDirectory(prefix="kvx-") as directory:
        yield pathlib.Path(directory)


class Demo:
    def __init__(self, directory: pathlib.Path, *flags: str) -> None:
        self.mark = str(directory)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.sglang.demo", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child.environment(SGLANG_VENV=sys.prefix, TMPDIR=self.mark, DEMO_MARK=self.mark),
        )

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=END_S)
        assert not self.left(), "it left processes behind"
        return self.process.returncode, out, err

    def left(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("DEMO_MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:  # it ended meanwhile, or is another user's
                continue
        return found


def test_it_does_the_page(directory: pathlib.Path) -> None:
    code, out, err = Demo(directory, "--tokens=1500").end()
    assert code == 0, out + err
    assert err == ""
    assert out.endswith("Token for token the same.\n")
    assert "\nMoved: " in out
    assert sum(map(int, re.findall(r"(\d+) by \w+", out))) == 3
    assert not list(directory.glob("kvxfer-*")), "logs are kept where something failed"


def test_it_can_be_interrupted_while_it_starts(directory: pathlib.Path) -> None:
    demo = Demo(directory)
    assert demo.process.stdout is not None
    threading.Timer(12.0, demo.process.send_signal, [signal.SIGINT]).start()
    code, _, err = demo.end()
    assert code == 130, err
    assert err == "demo-sglang: interrupted; all processes are ended\n"


def test_a_server_that_does_not_start_is_named(directory: pathlib.Path) -> None:
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "llama"}')
    code, _, err = Demo(directory, f"--model={model}").end()
    assert code == 1
    assert err.startswith("demo-sglang: prefill ended with code "), err
    assert f"its log is {directory}/kvxfer-demo-sglang-" in err
