"""``kvxfer drain``: which key it shows the router."""

from __future__ import annotations

import asyncio
import pathlib

import pytest

from kvxfer.cli import main
from tests.support.fake_workers import FakeWorker, router_over
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
