"""A service for a test: started, waited for with a bound, and ended with all its processes, whatever happens."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import time

import pytest

from kvxfer.errors import ConfigError, DeadlineExceededError, KvxferError
from kvxfer.load import served as module
from kvxfer.load.descendants import Seen, descendants
from kvxfer.load.served import served
from kvxfer.load.sweep import free_port

READY = json.dumps({"event": "ready", "url": "http://127.0.0.1:1", "model": "m"})


def script(*lines: str) -> list[str]:
    return [sys.executable, "-c", "\n".join(["import os, signal, subprocess, sys, time", *lines])]


def wait_file(path: pathlib.Path) -> str:
    deadline_s = time.monotonic() + 30
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return path.read_text()


def test_the_ready_line_is_found_among_others() -> None:
    command = script("print('hello')", "print('{}')", f"print('{READY}', flush=True)", "time.sleep(600)")
    with served(command) as service:
        assert (service.url, service.model) == ("http://127.0.0.1:1", "m")
        assert service.losses() == []
        pid = service.pid
    assert not pathlib.Path(f"/proc/{pid}").exists()


def test_it_may_end_in_its_own_way(tmp_path: pathlib.Path) -> None:
    said = tmp_path / "said"
    end = f"signal.signal(signal.SIGINT, lambda *_: (open({str(said)!r}, 'w').write('bye'), sys.exit(0)))"
    with served(script(end, f"print('{READY}', flush=True)", "time.sleep(600)")):
        pass
    assert said.read_text() == "bye"


def test_it_gets_one_ctrl_c(tmp_path: pathlib.Path) -> None:
    """The second one ends ``kvxfer serve`` without its children."""
    said = tmp_path / "said"
    count = f"signal.signal(signal.SIGINT, lambda *_: open({str(said)!r}, 'a').write('x'))"
    wait = f"while not os.path.exists({str(said)!r}): time.sleep(0.01)"
    with served(script(count, f"print('{READY}', flush=True)", wait, "time.sleep(0.3)")):
        pass
    assert said.read_text() == "x"


def test_what_ignores_signals_is_killed_with_what_it_started() -> None:
    deaf = "for n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, signal.SIG_IGN)"
    child = "import time; time.sleep(600)"
    start = f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"
    with served(script(deaf, start, f"print('{READY}', flush=True)", "time.sleep(600)"), stop_s=0.1) as service:
        below = descendants(service.pid)
        assert below
    assert not any(seen.is_running() for seen in below)


def test_an_orphan_of_its_session_is_ended_too() -> None:
    """The service is gone before it is ended; what it started is not its child any more."""
    start = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with served(script(start, f"print('{READY}', flush=True)", "sys.stdin.read(); time.sleep(0.2)")) as service:
        below = descendants(service.pid)
        service._process.wait(30)
        assert [loss for loss in service.losses() if "the service ended with code 0" in loss]
    assert below
    assert not any(seen.is_running() for seen in below)


def test_a_failed_block_ends_it_too() -> None:
    pids = []

    def fail() -> None:
        with served(script(f"print('{READY}', flush=True)", "time.sleep(600)")) as service:
            pids.append(service.pid)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not pathlib.Path(f"/proc/{pids[0]}").exists()


@pytest.mark.parametrize(
    ("lines", "kind", "said"),
    [
        (["print('kvxfer: no such model', file=sys.stderr)", "sys.exit(2)"], ConfigError, "code 2: no such model"),
        (
            ["print('one\\ntwo\\nthree\\nfour', file=sys.stderr)", "sys.exit(1)"],
            KvxferError,
            "code 1: two; three; four",
        ),
        (["os.kill(os.getpid(), signal.SIGKILL)"], KvxferError, "the service was ended by SIGKILL"),
        (["sys.stdout.close()", "os.close(1)", "time.sleep(600)"], DeadlineExceededError, "it closed its output"),
        (["print('loading', file=sys.stderr, flush=True)", "time.sleep(600)"], DeadlineExceededError, "loading"),
    ],
)
def test_a_failed_start_says_why(lines: list[str], kind: type[Exception], said: str) -> None:
    start_s = 2.0 if kind is DeadlineExceededError else 60.0
    with pytest.raises(kind, match=said), served(script(*lines), start_s=start_s, stop_s=5.0):
        pytest.fail("it is not ready")


def test_a_command_that_does_not_exist() -> None:
    with (
        pytest.raises(ConfigError, match="cannot start /nowhere/at/all: there is no such program"),
        served(["/nowhere/at/all"]),
    ):
        pytest.fail("it is not ready")


@pytest.mark.parametrize("route", ["/ready", "/health", "/v1/models"])
def test_a_foreign_service_is_ready_once_it_answers(route: str) -> None:
    port = free_port()
    server = [
        "import http.server",
        "asked = []",
        "class Handler(http.server.BaseHTTPRequestHandler):",
        "    def do_GET(self):",
        "        asked.append(self.path)",
        f"        is_it = self.path == {route!r}",
        f"        self.send_response(404 if not is_it else 200 if asked.count({route!r}) > 1 else 503)",
        "        self.end_headers()",
        f"http.server.HTTPServer(('127.0.0.1', {port}), Handler).serve_forever()",
    ]
    url = f"http://127.0.0.1:{port}"
    with served(script(*server), url=url, start_s=60.0) as service:
        assert (service.url, service.model, service.ready) == (url, "", {})


def test_it_can_have_a_lower_priority() -> None:
    with served(script(f"print('{READY}', flush=True)", "time.sleep(600)"), nice=3) as service:
        assert os.getpriority(os.PRIO_PROCESS, service.pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)
        group = pathlib.Path(f"/proc/{service.pid}/autogroup")
        assert not group.exists() or group.read_text().endswith("nice 3\n")


def test_a_start_can_be_given_up() -> None:
    with pytest.raises(KeyboardInterrupt), served(script("time.sleep(600)"), is_stopped=lambda: True):
        pytest.fail("it is not ready")


def test_all_can_be_killed_at_once() -> None:
    with served(script(f"print('{READY}', flush=True)", "time.sleep(600)")) as service:
        module.kill_all()
        assert service._process.wait(30) == -signal.SIGKILL


def test_a_process_with_a_reused_number_is_not_touched() -> None:
    with served(script(f"print('{READY}', flush=True)", "time.sleep(600)")) as service:
        other = Seen(service.pid, 1)
        other.send(signal.SIGKILL)
        assert not other.is_running()
        assert service.losses() == []
