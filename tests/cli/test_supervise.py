"""The supervisor against children that behave, fail, vanish, and will not stop; and its own sudden death."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from kvxfer.cli import stack, supervise
from kvxfer.cli.supervise import Child, ChildSpec, Supervisor
from kvxfer.errors import ConfigError, DeadlineExceededError, KvxferError
from tests.support.cli import fake_service
from tests.support.cli.processes import is_running

FAKE = (sys.executable, fake_service.__file__)


async def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)


async def test_ready_and_stopped_in_reverse_order() -> None:
    lines: list[tuple[str, str]] = []
    ready: list[str] = []
    async with Supervisor(
        command=FAKE, on_line=lambda *line: lines.append(line), on_ready=lambda child: ready.append(child.spec.name)
    ) as supervisor:
        first = await supervisor.start(ChildSpec("first", ["well"]), timeout_s=30)
        second = await supervisor.start(ChildSpec("second", ["well"]), timeout_s=30)
        assert first.address == "127.0.0.1:1"
        assert first.ready["pid"] == first.process.pid
        assert len(supervisor.children) == 2
    assert ready == ["first", "second"]
    assert [name for name, line in lines if line == "stopped well"] == ["second", "first"]
    assert (first.process.returncode, second.process.returncode) == (0, 0)


async def test_bad_configuration_is_told_in_the_childs_words() -> None:
    async with Supervisor(command=FAKE) as supervisor:
        with pytest.raises(ConfigError, match=r"^worker could not start: port 1 is taken$"):
            await supervisor.start(ChildSpec("worker", ["config"]), timeout_s=30)
        assert supervisor.children == ()


async def test_crash_at_start() -> None:
    async with Supervisor(command=FAKE) as supervisor:
        with pytest.raises(KvxferError, match="it ended with code 3") as caught:
            await supervisor.start(ChildSpec("worker", ["crash"]), timeout_s=30)
    assert not isinstance(caught.value, ConfigError)


async def test_never_ready() -> None:
    async with Supervisor(command=FAKE) as supervisor:
        with pytest.raises(DeadlineExceededError, match=r"^worker did not become ready: it did nothing for 0\.5 s$"):
            await supervisor.start(ChildSpec("worker", ["silent"]), timeout_s=0.5)
        assert supervisor.children == ()


async def test_ready_is_what_the_probe_answers() -> None:
    ready: list[Child] = []
    lost: list[Child] = []
    async with Supervisor(command=FAKE, on_ready=ready.append, on_lost=lost.append) as supervisor:
        child = await supervisor.start(ChildSpec("router", ["slow"], ready_path="/ready"), timeout_s=30)
        assert ready == [child]
        assert child.why_not_ready == "none at /ready"
        with pytest.raises(KvxferError, match=r"router could not start: it ended with code 3"):
            await supervisor.start(ChildSpec("router", ["dying"], ready_path="/ready"), timeout_s=30)
        assert supervisor.children == (child,)
    assert (ready, lost) == ([child], [])


async def test_why_a_child_was_not_ready_in_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def out_of_time(self: Supervisor, child: Child) -> None:
        child.why_not_ready = "no decode worker"
        raise TimeoutError("it did nothing for 30 s")

    monkeypatch.setattr(Supervisor, "_probe", out_of_time)
    async with Supervisor(command=FAKE) as supervisor:
        said = r"^router did not become ready: it did nothing for 30 s: no decode worker"
        with pytest.raises(DeadlineExceededError, match=said):
            await supervisor.start(ChildSpec("router", ["slow"], ready_path="/ready"), timeout_s=30)
        assert supervisor.children == ()


def test_all_that_serve_starts_and_has_http_is_probed() -> None:
    assert stack.worker_spec("prefill-0", "prefill", "tiny", 1).ready_path == "/ready" == stack.READY


async def test_an_endless_line_does_not_stop_the_child_that_writes_it() -> None:
    lines: list[str] = []
    async with Supervisor(command=FAKE, on_line=lambda name, line: lines.append(line)) as supervisor:
        await supervisor.start(ChildSpec("worker", ["talkative"]), timeout_s=20)
    assert lines[-1] == "stopped well"


async def test_lost_child_is_reported_and_others_stay() -> None:
    lost: list[Child] = []
    async with Supervisor(command=FAKE, on_lost=lost.append) as supervisor:
        first = await supervisor.start(ChildSpec("first", ["well"]), timeout_s=30)
        second = await supervisor.start(ChildSpec("second", ["well"]), timeout_s=30)
        first.process.kill()
        await wait_until(lambda: lost)
        assert lost == [first]
        assert first.ending() == "was ended by SIGKILL"
        assert second.process.returncode is None
    assert lost == [first]


async def test_child_that_will_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "STOP_GRACE_S", 0.3)
    lines: list[str] = []
    async with Supervisor(command=FAKE, on_line=lambda name, line: lines.append(line)) as supervisor:
        child = await supervisor.start(ChildSpec("worker", ["stubborn"]), timeout_s=30)
    assert child.process.returncode == -signal.SIGKILL
    assert lines == ["did not stop within 0.3 s and was killed"]


async def test_child_that_is_not_ready_yet_is_not_waited_for() -> None:
    lines: list[str] = []
    async with Supervisor(command=FAKE, on_line=lambda name, line: lines.append(line)) as supervisor:
        starting = asyncio.create_task(supervisor.start(ChildSpec("worker", ["deaf"]), timeout_s=30))
        await wait_until(lambda: "loading" in lines)
        [child] = supervisor.children
        starting.cancel()
        began_s = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert time.monotonic() - began_s < 10.0
    assert child.process.returncode == -signal.SIGKILL
    assert lines == ["loading"]


def test_children_die_with_a_killed_supervisor() -> None:
    source = (
        "import asyncio, sys\n"
        "from kvxfer.cli.supervise import ChildSpec, Supervisor\n"
        "async def main():\n"
        f"    async with Supervisor(command={FAKE!r}) as supervisor:\n"
        "        child = await supervisor.start(ChildSpec('worker', ['well']), timeout_s=30)\n"
        "        print(child.process.pid, flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        pid = int(process.stdout.readline())
        assert is_running(pid)
        process.kill()
    asyncio.run(wait_until(lambda: not is_running(pid)))
