"""Files of leg keys: what they may say, and that a wrong one changes nothing."""

from __future__ import annotations

import asyncio
import pathlib

import pytest

from kvxfer.errors import ConfigError
from kvxfer.observe import redact
from kvxfer.serving.leg_keys import FILE_KEYS_MAX, LegKeyFile, followed_leg_keys

FIRST, SECOND = "the-first-of-the-keys", "the-second-of-the-keys"


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    file = tmp_path / "leg-keys"
    file.touch(0o600)
    return file


def write(path: pathlib.Path, text: str) -> None:
    path.write_text(text)


def loaded(path: pathlib.Path) -> LegKeyFile:
    file = LegKeyFile(str(path))
    file.load()
    return file


def test_a_router_shows_the_first_and_a_worker_takes_all(path: pathlib.Path) -> None:
    path.write_text(f"# replaced in May\n\n {FIRST} \n{SECOND}\n{FIRST}\n")
    file = loaded(path)
    assert file.keys == (FIRST.encode(), SECOND.encode())
    assert file.headers == ((b"x-kvxfer-leg-key", FIRST.encode()),)
    assert FIRST not in redact(f"shown: {FIRST}")
    assert FIRST not in repr(file)


def test_without_a_file_nothing_is_shown() -> None:
    assert LegKeyFile().headers == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "must hold 1 to"),
        ("# only a remark\n", "must hold 1 to"),
        ("short\n", "is not 16 to 1,024 visible"),
        (f"{FIRST} {SECOND}\n", "is not 16 to 1,024 visible"),
        (f"{FIRST}é\n", "is not 16 to 1,024 visible"),
        ("x" * 1025, "is not 16 to 1,024 visible"),
        ("\n".join(f"a-key-with-a-number-{n}" for n in range(FILE_KEYS_MAX + 1)), "must hold 1 to"),
        ("#" * (1 << 17), "must hold 1 to"),
    ],
)
def test_a_wrong_file_is_refused_and_not_quoted(path: pathlib.Path, content: str, says: str) -> None:
    path.write_text(content)
    with pytest.raises(ConfigError, match=says) as caught:
        loaded(path)
    assert FIRST not in str(caught.value)


def test_a_file_that_others_may_read_is_refused(path: pathlib.Path) -> None:
    path.write_text(FIRST)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="may be read by others"):
        loaded(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="leg_key_file: cannot read"):
        loaded(tmp_path / "absent")


async def test_the_file_is_followed_and_a_wrong_one_changes_nothing(path: pathlib.Path) -> None:
    write(path, FIRST)
    async with followed_leg_keys(str(path)) as file, asyncio.timeout(20):
        write(path, "short")
        write(path, f"{SECOND}\n{FIRST}")
        while file.keys != (SECOND.encode(), FIRST.encode()):
            assert file.keys == (FIRST.encode(),)
            await asyncio.sleep(0.01)
