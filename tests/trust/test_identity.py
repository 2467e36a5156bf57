"""The names in certificates: every text is an identity or one error, and a name speaks for its own agents only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgumentError
from kvxfer.trust.identity import CertIdentity, CertRole, identity_among
from kvxfer.types import check_agent_id

clusters = st.from_regex(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?", fullmatch=True)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", fullmatch=True)
identities = st.builds(CertIdentity, clusters, st.sampled_from(CertRole), names)


@given(identities)
def test_an_identity_is_what_its_uri_says(identity: CertIdentity) -> None:
    assert CertIdentity.parse(str(identity)) == identity
    assert check_agent_id(identity.name) == identity.name


@given(st.text() | st.text(alphabet="kvxfer:/abA0.-_%", max_size=40).map("kvxfer://".__add__))
def test_every_other_text_is_one_error(text: str) -> None:
    try:
        identity = CertIdentity.parse(text)
    except InvalidArgumentError as error:
        assert len(str(error)) < 400  # noqa: PT017
    else:
        assert str(identity) == text


@pytest.mark.parametrize(
    "uri",
    [
        *("", "kvxfer://", "kvxfer://a/router", "kvxfer://a/router/", "kvxfer://a/router/r/x", "kvxfer:///router/r"),
        *("KVXFER://a/router/r", "https://a/router/r", "kvxfer://A/router/r", "kvxfer://a-/router/r"),
        *("kvxfer://a/boss/r", "kvxfer://a/Router/r", "kvxfer://a/router/r.1", "kvxfer://a/router/r%2e"),
        *(
            "kvxfer://a/router/r\n",
            "kvxfer://a/router/\u0440",
            f"kvxfer://a/router/{'r' * 64}",
            "kvxfer://a/router/r?x",
        ),
    ],
)
def test_near_misses_are_no_identity(uri: str) -> None:
    with pytest.raises(InvalidArgumentError):
        CertIdentity.parse(uri)


@given(identities, names)
def test_a_name_speaks_for_itself_and_what_follows_its_dot(identity: CertIdentity, other: str) -> None:
    assert identity.speaks_for(identity.name)
    assert identity.speaks_for(f"{identity.name}.{other}")
    assert not identity.speaks_for(f"{identity.name}{other}")
    assert identity.speaks_for(other) == (other == identity.name)


@given(identities, identities, names)
def test_two_names_speak_for_no_agent_in_common(one: CertIdentity, two: CertIdentity, suffix: str) -> None:
    agents = {one.name, two.name, f"{one.name}.{suffix}", f"{two.name}.{suffix}"}
    for agent_id in agents:
        assert not (one.speaks_for(agent_id) and two.speaks_for(agent_id)) or one.name == two.name


@given(identities, identities, st.lists(st.sampled_from(["spiffe://a/b", "https://a", "x"])))
def test_a_certificate_has_one_identity_among_its_uris(one: CertIdentity, two: CertIdentity, others: list[str]) -> None:
    assert identity_among([*others, str(one)]) == one
    for uris in (others, [str(one), *others, str(two)]):
        with pytest.raises(InvalidArgumentError, match="exactly one"):
            identity_among(uris)
    with pytest.raises(InvalidArgumentError):
        identity_among(["kvxfer://x/y"])
