"""Facts as a short text: a difference is named with both values, whatever the facts are, within the bound."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import IncompatibleError
from kvxfer.protocol import facts, handshake
from kvxfer.rpc.convert import POOLS_MAX
from kvxfer.types import CompatibilityRecord, Exposure, PoolRecord

NAMES = st.from_regex(r"[a-z_.]{1,40}", fullmatch=True).filter(lambda name: name != facts.OTHERS)
FACTS = st.dictionaries(NAMES, st.text(max_size=100), max_size=20)


def pool(config: dict[str, str]) -> PoolRecord:
    record = CompatibilityRecord("m", facts.digest_of(config), "w", "float16", 2, 3, 64, 16, "lb2thd", "", "", "sdpa")
    record = dataclasses.replace(record, facts=facts.facts_text(config))
    return PoolRecord(1, record, 8, 4096, Exposure.GRANT, False)


@given(FACTS, FACTS)
def test_every_difference_is_named(ours: dict[str, str], theirs: dict[str, str]) -> None:
    found = facts.differences(facts.facts_text(ours), facts.facts_text(theirs))
    if ours and theirs:
        names = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
        assert [name for name, *_ in found] == names
        assert (facts.digest_of(ours) == facts.digest_of(theirs)) == (not names)
    else:
        assert found == ()


@pytest.mark.parametrize(("count", "length"), [(10, 10_000), (100, 30), (300, 40), (4000, 50)])
def test_the_text_has_a_bound_and_still_tells_a_difference(count: int, length: int) -> None:
    ours = {f"some.config.of_{number}": "v" * length + str(number) for number in range(count)}
    theirs = {**ours, "some.config.of_7": "w" * length}
    for pools in (1, POOLS_MAX):
        texts = [facts.facts_text(config, pools) for config in (ours, theirs)]
        bound = min(facts.FACTS_BYTES_MAX, facts.AGENT_BYTES_MAX // pools)
        assert all(0 < len(text) <= bound and text.isascii() and text.isprintable() for text in texts)
        [(name, one, other)] = facts.differences(*texts)
        assert name in ("some.config.of_7", facts.OTHERS)
        assert one != other


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a":1}', '{"a\\n":"b"}', '{"":"b"}', '"a"', "[" * 4000])
def test_a_text_that_is_none_says_nothing(text: str) -> None:
    assert facts.differences(text, '{"a":"b"}') == facts.differences('{"a":"b"}', text) == ()


def test_a_refusal_names_the_settings_and_both_values() -> None:
    ours = {"model.dtype": "float16", "cache.scales": "a.json", "hf_config.rope_theta": "1e4"}
    theirs = {"model.dtype": "bfloat16", "hf_config.rope_theta": "1e4"}
    with pytest.raises(IncompatibleError) as caught:
        handshake.check(pool(ours), pool(theirs))
    assert str(caught.value) == (
        "pools do not match: cache.scales is 'a.json' here and 'not set' there; "
        "model.dtype is 'float16' here and 'bfloat16' there"
    )
    assert caught.value.field == "cache.scales"


def test_facts_are_not_compared_themselves() -> None:
    """A coordinator of an earlier version passes records on without them."""
    ours = pool({"a": "b"})
    theirs = dataclasses.replace(ours, record=dataclasses.replace(ours.record, facts=""))
    handshake.check(ours, theirs)
    assert ours.record.digest() == theirs.record.digest()
    with pytest.raises(IncompatibleError, match="config_fingerprint"):
        handshake.check(
            ours, dataclasses.replace(pool({"a": "c"}), record=dataclasses.replace(pool({"a": "c"}).record, facts=""))
        )


def test_a_record_of_an_earlier_version_has_no_facts() -> None:
    record = pool({"a": "b"}).record
    values = json.loads(record.to_json())
    assert CompatibilityRecord.from_json(json.dumps(values)).facts == record.facts
    del values["facts"]
    assert CompatibilityRecord.from_json(json.dumps(values)).facts == ""


def test_an_error_names_at_most_so_many() -> None:
    ours = {f"a{number:03}": "x" for number in range(100)}
    with pytest.raises(IncompatibleError, match="and 88 more") as caught:
        handshake.check(pool(ours), pool(dict.fromkeys(ours, "y")))
    assert str(caught.value).count(" here and ") == handshake.NAMED_MAX
