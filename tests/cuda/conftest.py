"""Two processes with memory on a CUDA device between them. Where there is no device these tests are skipped."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import pytest

from tests.support.cuda.ends import LIBRARY, EndProcess, Ends


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Makes a source and a reader that know each other."""
    made: list[EndProcess] = []
    stops = contextlib.ExitStack()

    def make(lanes: str, environment: dict[str, str] | None = None) -> tuple[EndProcess, EndProcess]:
        named = {"KVXFER_UCX_LIBRARY": LIBRARY.path} if "ucx" in lanes else {}
        for name in ("source", "reader"):
            made.append(EndProcess(name, lanes, {**named, **(environment or {})}))
            stops.callback(made[-1].stop)
        contacts = [end.ask("contact") for end in made]
        if "ucx" in lanes:
            assert [contact["obstacle"] for contact in contacts] == ["", ""]
        for end, other in zip(made, reversed(contacts), strict=True):
            end.ask("meet", other=other)
        return made[0], made[1]

    with stops:
        yield make


@pytest.fixture
def transfer() -> str:
    return secrets.token_hex(16)
