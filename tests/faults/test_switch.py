"""Hosts on a switch: one that is cut off hears nothing and is told nothing, and hears again when it is brought back."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.netns import ip, obstacle
from tests.support.switch import SwitchedHosts, switched

pytestmark = pytest.mark.skipif(bool(obstacle()), reason=obstacle())

ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 7)) as server:
    print("ready", flush=True)
    while True:
        server.accept()[0].close()
"""


@pytest.fixture
def hosts() -> Iterator[SwitchedHosts]:
    with switched("one", "two") as made:
        yield made


def answers(address: str) -> bool:
    try:
        socket.create_connection((address, 7), timeout=1.5).close()
    except OSError:
        return False
    return True


def test_a_host_that_is_cut_off_hears_nothing_until_it_is_brought_back(hosts: SwitchedHosts) -> None:
    served = []
    try:
        for name in ("one", "two"):
            command = [*hosts.command(name), sys.executable, "-I", "-S", "-c", ECHO, hosts.address(name)]
            served.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        for process in served:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        assert answers(hosts.address("one"))
        hosts.cut_off("one")
        assert not answers(hosts.address("one"))
        assert answers(hosts.address("two"))
        hosts.bring_back("one")
        assert answers(hosts.address("one"))
    finally:
        for process in served:
            process.kill()
            process.communicate()


def test_nothing_of_them_stays() -> None:
    with switched("one") as hosts:
        assert hosts.tag in ip("netns", "list")
    assert hosts.tag not in ip("netns", "list") + ip("-brief", "link")
