"""The lane contract, on every lane there is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest

from kvxfer.testing.contract.parties import LaneMaker, MemoryLaneMaker, NativeLaneMaker
from kvxfer.testing.contract.suite import CHECKS
from kvxfer.transport import ucx
from kvxfer.types import EncryptMode, Lane, ProgressMode

MAKERS: dict[str, Callable[[], LaneMaker]] = {
    "memory": MemoryLaneMaker,
    "mapped": functools.partial(NativeLaneMaker, Lane.MAPPED),
    "stream": functools.partial(NativeLaneMaker, Lane.STREAM),
    "unix": functools.partial(NativeLaneMaker, Lane.UNIX),
    "cma": functools.partial(NativeLaneMaker, Lane.CMA),
    "ucx": functools.partial(NativeLaneMaker, Lane.UCX),
    "mapped-by-callers": functools.partial(NativeLaneMaker, Lane.MAPPED, ProgressMode.CALLER),
    "stream-tls": functools.partial(NativeLaneMaker, Lane.STREAM, encrypt=EncryptMode.ALWAYS),
    "stream-by-callers": functools.partial(NativeLaneMaker, Lane.STREAM, ProgressMode.CALLER),
    "stream-tls-by-callers": functools.partial(
        NativeLaneMaker, Lane.STREAM, ProgressMode.CALLER, encrypt=EncryptMode.ALWAYS
    ),
}

UCX = ucx.find_library()
"""Loaded only by cores that serve the lane: the other lanes' tests run without it."""


@pytest.fixture(params=MAKERS)
def maker(request: pytest.FixtureRequest) -> Iterator[LaneMaker]:
    if request.param == "ucx" and not UCX.path:
        pytest.skip(ucx.missing(UCX))
    made = MAKERS[request.param]()
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_contract(maker: LaneMaker, check: Callable[[LaneMaker], None]) -> None:
    check(maker)
