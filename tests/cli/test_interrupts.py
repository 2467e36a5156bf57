"""Ctrl-C asks for the end, a second one ends at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kvxfer.cli.interrupts import CommandInterrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with CommandInterrupts() as interrupts:
        assert not interrupts.stop.is_set()
        assert interrupts.exit_code == 0
        os.kill(os.getpid(), number)
        assert interrupts.stop.wait(30)
        assert interrupts.exit_code == 128 + number
    assert signal.getsignal(number) == before


def test_the_second_ends_at_once_after_what_must_be_done() -> None:
    source = (
        "import os, signal\n"
        "from kvxfer.cli.interrupts import CommandInterrupts\n"
        "def forced():\n"
        "    os.write(1, b'forced')\n"
        "    raise ValueError\n"
        "with CommandInterrupts(on_forced=forced):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    signal.pause()\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, timeout=60)
    assert done.returncode == 130
    assert done.stdout == b"forced"
    assert done.stderr == b"kvxfer: interrupted twice, ending at once\n"
