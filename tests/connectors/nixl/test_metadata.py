"""Metadata blobs, and what adding one does."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.connectors.nixl import metadata as form
from kvxfer.connectors.nixl import nixl_agent
from kvxfer.connectors.nixl.bindings import (
    DRAM_SEG,
    nixlBackendError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNotFoundError,
    nixlRegDList,
)
from kvxfer.connectors.nixl.notification_inbox import envelope_for, open_envelope
from kvxfer.connectors.nixl.registry import newest
from kvxfer.types import AgentRef, DataAddress, Incarnation, Lane, RegionRecord
from tests.support.nixl.agents import MakeAgent, memory, register, row

REF = AgentRef("a", Incarnation(0, bytes(range(16))))
RECORD = RegionRecord(1 << 24, 4096, 100)
WHOLE = form.AgentMetadata(
    "a", REF, (RECORD,), True, DataAddress("127.0.0.1", 4000, "/run/x.sock", "host:0", (Lane.STREAM,)), bytes(32)
)


def test_metadata_survives_the_way() -> None:
    partial = form.AgentMetadata("a", REF, (), False)
    for given_ in (WHOLE, partial):
        assert form.decode_metadata(form.encode_metadata(given_)) == given_
    assert bytes(32).hex() not in repr(WHOLE)
    assert b"capability" not in form.encode_metadata(partial)


def test_foreign_metadata_is_refused() -> None:
    for blob in (b"", b"garbage", b"\x80\x04.", b"kvxfer-nixl-metadata/2\n{}", b"kvxfer-nixl-metadata/1\n"):
        with pytest.raises(nixlMismatchError):
            form.decode_metadata(blob)
    with pytest.raises(TypeError):
        form.decode_metadata("text")


VALUES: dict[str, Any] = json.loads(form.encode_metadata(WHOLE).partition(b"\n")[2])
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from([*VALUES, *(f"connection/{key}" for key in VALUES["connection"]), "regions/0"]), JUNK)
def test_damaged_metadata_is_one_error_or_metadata(place: str, junk: Any) -> None:
    values = json.loads(json.dumps(VALUES))
    outer, _, inner = place.partition("/")
    if inner:
        values[outer][int(inner) if inner == "0" else inner] = junk
    else:
        values[outer] = junk
    blob = form.MAGIC + b"1\n" + json.dumps(values).encode()
    try:
        found = form.decode_metadata(blob)
    except nixlMismatchError:
        return
    assert form.decode_metadata(form.encode_metadata(found)) == found


@given(st.binary(max_size=200))
def test_any_bytes_are_metadata_or_one_error(data: bytes) -> None:
    with pytest.raises(nixlMismatchError):
        form.decode_metadata(form.MAGIC + b"1\n" + data)


@given(st.text(min_size=1, max_size=80))
def test_every_name_has_an_agent_id_and_an_envelope(name: str) -> None:
    agent_id = form.wire_id(name)
    assert len(agent_id) <= 64
    assert open_envelope(agent_id, envelope_for(name)(b"\0text")) == (name, b"\0text")
    assert open_envelope("another", envelope_for(name)(b"x")) != (name, b"x") or name == "another"


@given(st.binary(max_size=40))
def test_any_payload_is_a_notification_or_none(payload: bytes) -> None:
    opened = open_envelope("a", payload)
    assert opened is None or opened[0] == "a" or form.wire_id(opened[0]) == "a"


def test_newer_regions_hide_those_they_cover() -> None:
    def record(region_id: int, address: int, length: int) -> RegionRecord:
        return RegionRecord(region_id, address, length)

    stale, fresh = record(1, 4096, 100), record(2, 4096, 100)
    assert newest([fresh, stale]) == (fresh,)
    inside, around = record(1, 4100, 10), record(2, 4096, 100)
    assert newest([inside, around]) == (around,)
    later_inside = dataclasses.replace(inside, region_id=3)
    assert set(newest([later_inside, around])) == {later_inside, around}


# --- agents ---


def test_whole(pair: tuple[nixl_agent, nixl_agent]) -> None:
    one, other = pair
    mine = memory(4096)
    register(other, mine)
    assert not one.check_remote_metadata("target")
    assert one.add_remote_agent(other.get_agent_metadata()) == b"target"
    assert one.add_remote_agent(other.get_agent_metadata()) == b"target"
    inside = one.get_xfer_descs([row(mine, 64, 64)], "DRAM")
    outside = one.get_xfer_descs([row(mine, 4095, 2)], "DRAM")
    assert one.check_remote_metadata("target", inside)
    assert one.check_remote_metadata(b"target", inside)  # type: ignore[arg-type]
    assert not one.check_remote_metadata("target", outside)
    assert not one.check_remote_metadata("target", one.get_xfer_descs([row(mine, 64, 64)], "VRAM"))
    one.remove_remote_agent("target")
    one.remove_remote_agent("target")
    assert not one.check_remote_metadata("target")


def test_whole_metadata_replaces_what_was_known(pair: tuple[nixl_agent, nixl_agent]) -> None:
    one, other = pair
    first, second = memory(4096), memory(4096)
    registered = register(other, first)
    one.add_remote_agent(other.get_agent_metadata())
    other.deregister_memory(registered)
    register(other, second)
    one.add_remote_agent(other.get_agent_metadata())
    assert not one.check_remote_metadata("target", one.get_xfer_descs([row(first)], "DRAM"))
    assert one.check_remote_metadata("target", one.get_xfer_descs([row(second)], "DRAM"))


def test_partial(pair: tuple[nixl_agent, nixl_agent]) -> None:
    one, other = pair
    first, second = memory(4096), memory(4096)
    descs = [register(other, array) for array in (first, second)]
    lists = [one.get_xfer_descs([row(array)], "DRAM") for array in (first, second)]
    with pytest.raises(nixlNotFoundError):
        one.add_remote_agent(other.get_partial_agent_metadata(descs[0], False))
    assert not one.check_remote_metadata("target")
    one.add_remote_agent(other.get_partial_agent_metadata(nixlRegDList(DRAM_SEG)))
    assert one.check_remote_metadata("target")
    assert [one.check_remote_metadata("target", each) for each in lists] == [False, False]
    one.add_remote_agent(other.get_partial_agent_metadata(descs[0], False))
    assert [one.check_remote_metadata("target", each) for each in lists] == [True, False]
    one.add_remote_agent(other.get_partial_agent_metadata(descs[1], True, ["UCX"]))
    assert [one.check_remote_metadata("target", each) for each in lists] == [True, True]
    with pytest.raises(nixlNotFoundError):
        other.get_partial_agent_metadata(other.get_reg_descs([(*row(memory(64)), "")], "DRAM"))


def test_metadata_of_another_incarnation_is_refused_until_removal(make_agent: MakeAgent) -> None:
    one, first, second = make_agent("one"), make_agent("target"), make_agent("target")
    one.add_remote_agent(first.get_agent_metadata())
    with pytest.raises(nixlNotAllowedError, match="remove_remote_agent"):
        one.add_remote_agent(second.get_agent_metadata())
    one.remove_remote_agent("target")
    one.add_remote_agent(second.get_agent_metadata())
    one.remove_remote_agent("target")
    one.add_remote_agent(first.get_agent_metadata())


def test_own_and_unreadable_metadata_are_refused(make_agent: MakeAgent) -> None:
    one = make_agent("one")
    with pytest.raises(nixlInvalidParamError):
        one.add_remote_agent(one.get_agent_metadata())
    with pytest.raises(nixlInvalidParamError):
        one.remove_remote_agent("one")
    for call in (
        lambda: one.prep_xfer_dlist("absent", [(4096, 64, 0)], "DRAM"),
        lambda: one.send_notif("absent", b""),
        lambda: one.make_connection("absent"),
    ):
        with pytest.raises(nixlNotFoundError):
            call()


def test_an_agent_without_backends(make_agent: MakeAgent) -> None:
    agent, other = make_agent("a", backends=[]), make_agent("b")
    for call in (agent.get_new_notifs, lambda: agent.add_remote_agent(other.get_agent_metadata())):
        with pytest.raises(nixlBackendError):
            call()
    with pytest.raises(nixlInvalidParamError):
        agent.get_agent_metadata()
    with pytest.raises(nixlNotFoundError):
        register(agent, memory(64))
    assert not agent.check_remote_metadata("b")
    agent.create_backend("UCX")
    assert agent.get_agent_metadata()


def test_wrong_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("KVXFER_NIXL_BAD_INPUT", "maybe"),
        ("KVXFER_NIXL_DEADLINE_S", "soon"),
        ("KVXFER_NIXL_STRIPES", "-1"),
        ("KVXFER_NIXL_STRIPES", "65"),
        ("KVXFER_NIXL_CHECKSUM", "always"),
        ("KVXFER_NIXL_CHECKS", "on"),
        ("KVXFER_NIXL_COPY_THREADS", "some"),
        ("KVXFER_NIXL_COPY_THREADS", "65"),
        ("NIXL_TELEMETRY_ENABLE", "perhaps"),
        ("KVXFER_LANES", "pigeon"),
        ("KVXFER_NIXL_HOST", "192.0.2.1"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(nixlInvalidParamError):
                nixl_agent("a")
