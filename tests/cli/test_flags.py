"""Flags made from a dataclass, and the dataclass made back."""

from __future__ import annotations

import argparse
import dataclasses
import enum
from typing import Any, Literal

import pytest

from kvxfer.cli.flags import add_flags, options_from, to_flags
from kvxfer.types import Lane


class Size(enum.StrEnum):
    SMALL = "small"
    LARGE = "large"


def option(default: Any, text: str, **metadata: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, **metadata})


@dataclasses.dataclass(frozen=True)
class Options:
    name: str
    port: int = option(0, "port")
    share: float = option(0.5, "50 % by default")
    size: Size = dataclasses.field(default=Size.SMALL, metadata={"help": "size"})
    kind: Literal["a", "b"] = option("a", "kind")
    insecure: bool = option(False, "insecure")
    limit: int | None = option(None, "limit")
    lanes: tuple[Lane, ...] = option((Lane.MAPPED, Lane.STREAM), "lanes")
    policy: str = option("fail", "policy", choices=("fail", "recompute"))


def parse(*words: str) -> Options:
    parser = argparse.ArgumentParser()
    add_flags(parser, Options)
    parser.format_help()
    return options_from(Options, parser.parse_args(words))


def test_defaults() -> None:
    assert parse("--name=x") == Options("x")


def test_every_kind() -> None:
    words = (
        "--name y --port 7 --share 0.25 --size large --kind b --insecure --limit 3 --lanes stream --policy recompute"
    )
    expected = Options("y", 7, 0.25, Size.LARGE, "b", True, 3, (Lane.STREAM,), "recompute")
    assert parse(*words.split()) == expected
    assert parse(*to_flags(dataclasses.asdict(expected))) == expected


@pytest.mark.parametrize(
    "words", ["", "--name x --port y", "--name x --size huge", "--name x --kind c", "--name x --policy x --lanes none"]
)
def test_wrong_words_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*words.split())
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_an_option_of_an_unknown_kind_is_a_bug() -> None:
    @dataclasses.dataclass
    class Bad:
        table: dict[str, int] = dataclasses.field(default_factory=dict)

    with pytest.raises(TypeError, match="no flag can be made"):
        add_flags(argparse.ArgumentParser(), Bad)


def test_a_list_that_is_given_twice_has_the_words_of_both() -> None:
    assert parse("--name=x", "--lanes=mapped", "--lanes=stream,cma").lanes == (Lane.MAPPED, Lane.STREAM, Lane.CMA)
    assert parse("--name=x").lanes == (Lane.MAPPED, Lane.STREAM)


def test_none_and_false_as_words() -> None:
    assert to_flags({"limit": None, "insecure": False, "size": Size.LARGE}) == ["--no-insecure", "--size=large"]
