"""``kvxfer drain``: which key it shows the router."""

from __future__ import annotations

import asyncio
import pathlib

import pytest

from kvxfer.cli import drain, main
from kvxfer.errors import TransportError
from tests.support.fake_workers import FakeWorker, eventually, router_over
from tests.support.local_http import free_ports


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no admin key"),
        ("# nothing\n\n", "holds no admin key"),
        ("keys:\n- {name: a, key: secret-one}\n", "describes keys"),
        ('{"keys": []}', "describes keys"),
        ("kl\u00fcchen\n", "no header can carry"),
        ("a\x01b\n", "no header can carry"),
    ],
)
def test_a_file_without_a_key_in_a_line_is_refused_without_its_words(
    text: str, reason: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    [port] = free_ports(1)
    assert main(["drain", "d0", f"--router=http://127.0.0.1:{port}", f"--admin-key-file={path}"]) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert "secret-one" not in said


async def test_the_first_key_of_the_routers_own_file_is_shown(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# those that may drain\n\n  secret-one  \nsecret-two\n")
    async with router_over(FakeWorker("d0"), admin_key_file=str(path)) as router:
        flags = ["drain", "d0", f"--router={router.url}", f"--admin-key-file={path}"]
        assert await asyncio.to_thread(main, flags) == 0
        assert router.workers.describe()[0]["is_drained_here"]


def test_a_wait_that_is_no_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "d0", "--router=http://127.0.0.1:9", "--wait=nan"]) == 2
    assert "--wait must be 0 or more" in capsys.readouterr().err


async def test_a_router_that_forgets_is_told_again(tmp_path: pathlib.Path) -> None:
    """As one does that restarts: it takes the worker for one like the others, and gives it requests."""
    path = tmp_path / "keys"
    path.write_text("secret-one\n")
    async with (
        router_over(FakeWorker("d0"), admin_key_file=str(path)) as busy,
        router_over(FakeWorker("d0"), admin_key_file=str(path)) as restarts,
    ):
        inflight = busy.workers.describe()[0]["inflight"]
        runs = [True]

        def describe() -> list[dict[str, object]]:
            return [{"agent_id": "d0", "inflight": {**inflight, "decode": int(runs[0])}}]

        told = busy.workers.describe
        busy.workers.describe = describe  # type: ignore[method-assign]
        flags = ["drain", "d0", f"--router={busy.url}", f"--router={restarts.url}", f"--admin-key-file={path}"]
        waiting = asyncio.create_task(asyncio.to_thread(main, flags))
        for _ in range(2):
            await eventually(lambda: restarts.workers.describe()[0]["is_drained_here"])
            restarts.workers.drain("d0", False)
        await eventually(lambda: restarts.workers.describe()[0]["is_drained_here"])
        assert not waiting.done()
        runs[0] = False
        assert await waiting == 0
        assert told()[0]["is_drained_here"]


async def test_only_where_no_router_takes_the_order_is_that_an_error(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    path.write_text("secret-one\n")
    [nobody] = free_ports(1)
    away = f"--router=http://127.0.0.1:{nobody}"
    async with router_over(FakeWorker("d0"), admin_key_file=str(path)) as router:
        there, key = f"--router={router.url}", f"--admin-key-file={path}"
        assert await asyncio.to_thread(main, ["drain", "d0", away, there, key]) == 0
        assert f"127.0.0.1:{nobody} does not answer" in capsys.readouterr().err
        assert await asyncio.to_thread(main, ["drain", "d9", there, key]) == 2
        assert "'d9' is not known here" in capsys.readouterr().err
        assert await asyncio.to_thread(main, ["drain", "d0", away, key]) == 1


async def test_routers_that_go_away_for_good_are_not_waited_for_to_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drain, "AWAY_S", 0.3)
    answers = [drain._DrainAnswer("http://r", 1), *[drain._DrainAnswer("http://r", 0, TransportError("gone"))] * 99]
    monkeypatch.setattr(drain._Admin, "drain", lambda self, worker: answers.pop(0))
    assert await asyncio.to_thread(main, ["drain", "d0", "--router=http://127.0.0.1:9"]) == 1
    assert len(answers) > 90
    assert capsys.readouterr().err.count("it is asked again") == 1
