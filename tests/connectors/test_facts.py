"""Settings as facts: every one counts unless it is exempt, and is told the same by every process."""

from __future__ import annotations

import collections
import dataclasses
import decimal
import enum
import functools
import pathlib
import re
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.connectors.common.facts import Exemptions, facts_of, names_of
from kvxfer.errors import ConfigError


class Kind(enum.Enum):
    ONE = 1


@dataclasses.dataclass
class Part:
    port: int = 0
    scale: float = 1.5
    names: Any = ()


@dataclasses.dataclass
class Config:
    part: Part = dataclasses.field(default_factory=Part)
    logs: dict[str, int] = dataclasses.field(default_factory=lambda: {"level": 3})
    kind: Kind = Kind.ONE
    off: bool = False
    nothing: str | None = None


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def apply(self) -> float:
        return self.scale

    def __repr__(self) -> str:
        return "Scaled"


@functools.wraps(len)
def wrapped(value: Any) -> int:
    return 1 + len(value)


NOT_TOLD = [
    *(np.arange(4096.0), np.zeros(2), torch.ones(4096), torch.tensor([1.000001]), np.zeros(1, [("a", "f4")])[0]),
    *(Scaled(1), Scaled(1).apply, decimal.Context(prec=3).plus, functools.partial(round, ndigits=2), wrapped),
    *(re.compile("a" * 300), collections.deque([1]), slice(1), {Scaled(1): 1}),
]
"""Their reprs or names are alike where the values differ, or may be."""

EXEMPT = Exemptions({"part.port": "where it listens", "logs.*": "logs"})


def test_every_setting_counts_but_what_is_exempt_or_off() -> None:
    assert facts_of(Config(), EXEMPT) == {"part.scale": "1.5", "kind": "ONE"}
    assert facts_of(Config(Part(port=7), {"level": 1}), EXEMPT) == facts_of(Config(), EXEMPT)
    assert facts_of({"new": {"thing": 1}}, EXEMPT, "engine") == {"engine.new.thing": "1"}
    assert facts_of(Config(off=True), EXEMPT)["off"] == "true"
    assert facts_of({"scale": 0.0, "at": 0, "unset": None, "names": []}, EXEMPT) == {"scale": "0.0", "at": "0"}
    assert names_of(Config(), EXEMPT) == ["part.port", "part.scale", "part.names", "logs", "kind", "off", "nothing"]


def test_a_part_is_not_exempt_by_a_name_that_begins_alike() -> None:
    assert facts_of({"logs_of_kv": 1, "log": {"level": 2}}, EXEMPT) == {"logs_of_kv": "1", "log.level": "2"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b", "a"}, '["a","b"]'),
        ((1, Kind.ONE), '[1,"ONE"]'),
        (pathlib.PurePosixPath("/a"), "/a"),
        ({1: Part(2)}, '{"1":{"names":[],"port":2,"scale":1.5}}'),
        (len, "builtins.len"),
        ([Kind], '["test_facts.Kind"]'),
        (1 + 2j, "(1+2j)"),
        (torch.bfloat16, "torch.bfloat16"),
        (np.float32(0.1), "np.float32(0.1)"),
        (decimal.Decimal("1.000000000000000000001"), "Decimal('1.000000000000000000001')"),
        ({Kind.ONE: 1, 2: 3}, '{"2":3,"ONE":1}'),
    ],
)
def test_a_value_is_told_the_same_everywhere(value: Any, text: str) -> None:
    found = facts_of(Part(names=value), EXEMPT, "at")
    assert found["at.names"].replace("tests.connectors.", "") == text


def test_a_value_that_cannot_be_told_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"setting part\.names has a value of type object"):
        facts_of(Config(Part(names=[object()])), EXEMPT)
    with pytest.raises(ConfigError, match="function"):
        facts_of(Config(Part(names=lambda: None)), EXEMPT)
    for value in NOT_TOLD:
        with pytest.raises(ConfigError, match=r"setting part\.names"):
            facts_of(Config(Part(names=value)), EXEMPT)
        with pytest.raises(ConfigError, match=r"setting part\.names"):
            facts_of(Config(Part(names=[{1: value}])), EXEMPT)
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ConfigError, match=r"part\.names is nested deeper"):
        facts_of(Config(Part(names=deep)), EXEMPT)
    with pytest.raises(ConfigError, match="SETTINGS_MAX"):
        facts_of({str(number): 1 for number in range(5000)}, EXEMPT)
