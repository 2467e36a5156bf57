"""The table of permissions: everything that it does not list is forbidden, and an agent registers as itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ForbiddenError
from kvxfer.trust.identity import CertIdentity, CertRole
from kvxfer.trust.permissions import CALLS, JOINS, SERVES, ControlCall, Subject, check
from kvxfer.types import Role
from tests.trust.test_identity import identities, names

subjects = st.builds(Subject, names, st.sampled_from(Role), st.booleans())


def is_allowed(caller: CertIdentity | None, call: ControlCall, subject: Subject) -> bool:
    try:
        check(caller, call, subject)
    except ForbiddenError as error:
        return not (str(caller) in str(error) and error.code == "forbidden")
    return True


def test_every_role_has_a_row_and_those_that_register_have_parts() -> None:
    assert set(CALLS) == set(CertRole)
    registering = {role for role, calls in CALLS.items() if ControlCall.REGISTER in calls}
    assert set(SERVES) == set(JOINS) == registering
    assert all(SERVES[role] <= JOINS[role] for role in registering)


@given(identities, st.sampled_from(ControlCall), subjects)
def test_what_the_table_does_not_list_is_forbidden(caller: CertIdentity, call: ControlCall, subject: Subject) -> None:
    if is_allowed(caller, call, subject):
        assert call in CALLS[caller.role]


@given(identities, subjects)
def test_a_registration_is_of_the_own_name_and_part(caller: CertIdentity, subject: Subject) -> None:
    if is_allowed(caller, ControlCall.REGISTER, subject):
        assert subject.agent_id == caller.name
        assert caller.role not in (CertRole.ROUTER, CertRole.OPERATOR, CertRole.METRICS, CertRole.COORDINATOR)
    own = Subject(caller.name, subject.role, subject.has_http)
    parts = {CertRole.PREFILL: {Role.PREFILL}, CertRole.DECODE: {Role.DECODE}, CertRole.WORKER: set(Role)}
    if own.has_http:
        assert is_allowed(caller, ControlCall.REGISTER, own) == (own.role in parts.get(caller.role, set()))


@given(st.sampled_from(ControlCall), subjects)
def test_the_token_alone_may_do_everything(call: ControlCall, subject: Subject) -> None:
    assert is_allowed(None, call, subject)


@pytest.mark.parametrize("role", [CertRole.ROUTER, CertRole.OPERATOR])
def test_routers_and_operators_watch_and_drain_any(role: CertRole) -> None:
    caller = CertIdentity("default", role, "x")
    assert is_allowed(caller, ControlCall.WATCH, Subject())
    assert is_allowed(caller, ControlCall.DRAIN, Subject("p0"))
    assert not is_allowed(caller, ControlCall.REGISTER, Subject("x"))
