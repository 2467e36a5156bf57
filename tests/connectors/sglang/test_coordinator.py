"""Engines that find each other by a coordinator: no agent metadata travels."""

from __future__ import annotations

import pathlib

import pytest

from kvxfer.connectors.sglang.core import drawn_agent_id
from kvxfer.errors import ConfigError
from kvxfer.trust.identity import CertRole
from kvxfer.types import Role
from tests.support.sglang_core.coordinator import coordinator
from tests.support.sglang_core.cores import Copy, Rank, check, idle, open_room, options, running
from tests.support.trust import ClusterAuthority


def test_ranks_find_each_other_by_a_coordinator(tmp_path: pathlib.Path) -> None:
    token_file = pathlib.Path(options(tmp_path).token_file)
    with coordinator(token_file) as address:
        chosen = options(tmp_path, coordinator=address)
        p, d = Rank("p", Role.PREFILL, chosen), Rank("d", Role.DECODE, chosen)
        move_one(p, d)


def test_ranks_show_certificates_in_place_of_the_token(tmp_path: pathlib.Path) -> None:
    ca = ClusterAuthority(tmp_path / "ca")
    token_file = pathlib.Path(options(tmp_path).token_file)
    with coordinator(token_file, **ca.coordinator_options()) as address:
        ranks = []
        for role in (Role.PREFILL, Role.DECODE):
            issued = ca.issue(CertRole(role.value), f"{role.value}-0")
            chosen = options(
                tmp_path,
                coordinator=address,
                token_file="",
                coordinator_ca_file=ca.ca_file,
                coordinator_cert_file=str(issued.cert_file),
                coordinator_key_file=str(issued.key_file),
            )
            agent_id = drawn_agent_id(chosen, role)
            assert agent_id.startswith(f"{role.value}-0.")
            assert agent_id != drawn_agent_id(chosen, role)
            ranks.append(Rank(agent_id, role, chosen))
        move_one(*ranks)


def test_a_name_that_is_too_long_is_refused(tmp_path: pathlib.Path) -> None:
    ca = ClusterAuthority(tmp_path / "ca")
    for letters in (47, 48):
        issued = ca.issue(CertRole.PREFILL, "p" * letters)
        chosen = options(
            tmp_path,
            coordinator="127.0.0.1:1",
            coordinator_ca_file=ca.ca_file,
            coordinator_cert_file=str(issued.cert_file),
            coordinator_key_file=str(issued.key_file),
        )
        if letters == 47:
            assert len(drawn_agent_id(chosen, Role.PREFILL)) == 64
        else:
            with pytest.raises(ConfigError, match="too long for an engine of SGLang: at most 47 letters"):
                drawn_agent_id(chosen, Role.PREFILL)


def move_one(p: Rank, d: Rank) -> None:
    """One room, from a page each of the other's choice."""
    with running(p, d):
        assert p.core.export_metadata() == ""
        p.write(p.kv, (7, 8), 1)
        p.write(p.aux, (0,), 1)
        open_room(p, d, 5, (1, 2), 0)
        p.sources.send(5, 0, (7, 8), is_last=True, aux_row=0)
        d.wait("done", 5)
        p.wait("sent", 5)
        check(p, d, Copy(((7, 8), (1, 2)), ((0,), (0,))))
        idle(p, d)
