"""Whatever reads a peer's bytes in Python: a value or its one error, any bytes and good ones with some changed.

Hypothesis gives every target of `make fuzz` some, in every run of the tests; `make fuzz` looks further.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.openai.sse import EventDecoder, encode_event
from kvxfer.router import merge
from kvxfer.router.dialects import Prefilled
from tests.fuzz.python_targets import TARGETS
from tests.fuzz.python_targets.serving import CHUNK

pytestmark = pytest.mark.no_sanitizer

Change = tuple[str, float, bytes]
EDGES = (
    b"\0",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"-1",
    b"null",
    b"[]",
    b"{}",
    b'"',
    b"1e999",
    b"9" * 25,
    b"\xff" * 8,
    b"[" * 3000,
)
edits = st.lists(
    st.tuples(
        st.sampled_from(("put", "over", "cut", "double")),
        st.floats(0, 1, exclude_max=True),
        st.sampled_from(EDGES) | st.binary(min_size=1, max_size=6),
    ),
    max_size=4,
)


def edited(data: bytes, changes: Sequence[Change]) -> bytes:
    for kind, place, some in changes:
        at = int(place * (len(data) + 1))
        end = at + len(some)
        middle = {"put": some + data[at:end], "over": some, "cut": b"", "double": data[at:end] * 2}[kind]
        data = data[:at] + middle + data[end:]
    return data


def damaged(samples: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    return st.binary(max_size=100) | st.builds(edited, st.sampled_from(samples), edits)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=300)
@given(data=st.data())
def test_a_value_or_one_error(name: str, data: st.DataObject) -> None:
    target = TARGETS[name]
    target.is_value(data.draw(damaged(target.seeds)))


JSON = st.recursive(st.none() | st.floats() | st.text(max_size=3), lambda some: st.lists(some, max_size=2))


@given(st.dictionaries(st.sampled_from(["queue_s", "prefill_s", "ended_unix_s"]), JSON))
@example({"queue_s": float("inf")})
def test_timings_of_a_prefill_worker(timings: dict[str, Any]) -> None:
    """They go into D's account, or D's event stays as it is."""
    account = Prefilled(timings=timings).account()
    [event] = EventDecoder().feed(encode_event(CHUNK))
    merged = merge.Merger("kvxfer", has_source=True).event(event, account, Prefilled(timings=timings))
    assert merged == event.raw or merged == encode_event({**CHUNK, "kvxfer": {"lane": "cma", **account}})
