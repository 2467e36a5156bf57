"""The table of permissions over real gRPC: every call, by every caller, about every subject; and as docs show it."""

from __future__ import annotations

import pathlib
import re

import pytest

from kvxfer.errors import AuthenticationError, ForbiddenError, KvxferError, RefusedError
from kvxfer.rpc import drain
from kvxfer.rpc.watch import acquaint
from kvxfer.trust.identity import CertRole
from kvxfer.trust.permissions import CALLS, JOINS, SERVES, ControlCall
from kvxfer.types import Role
from tests.support.coordinator import running, until
from tests.support.trust import CertifiedAgent, ClusterAuthority, ForcedFiles, register, watch

pytest.importorskip("cryptography")

URL = "http://127.0.0.1:1"
NAME = "me"
NOT_FOR = {
    *(
        (role, ControlCall.WATCH)
        for role in CertRole
        if role not in (CertRole.COORDINATOR, CertRole.ROUTER, CertRole.OPERATOR)
    ),
    *((role, ControlCall.DRAIN) for role in CertRole if role not in (CertRole.ROUTER, CertRole.OPERATOR)),
    *((role, ControlCall.ACQUAINT) for role in CertRole if role is not CertRole.COORDINATOR),
}
"""Written down again, by hand: a row that is added to the product's table by mistake fails here."""
PARTS = {
    CertRole.PREFILL: {(Role.PREFILL, True), (Role.PREFILL, False), (Role.BOTH, False)},
    CertRole.DECODE: {(Role.DECODE, True), (Role.DECODE, False), (Role.BOTH, False)},
    CertRole.WORKER: {(role, has_http) for role in Role for has_http in (True, False)},
    CertRole.TIER: {(Role.BOTH, False)},
}
"""(part, whether it serves HTTP) as which each role may register itself."""


@pytest.fixture
def ca(tmp_path: pathlib.Path) -> ClusterAuthority:
    return ClusterAuthority(tmp_path / "ca")


async def outcome(call: object) -> str:
    """``ok``, or the code of what the call raises."""
    try:
        await call  # type: ignore[misc]
    except KvxferError as error:
        return error.code
    return "ok"


@pytest.mark.parametrize("role", CertRole)
async def test_each_caller_makes_each_call(role: CertRole, tmp_path: pathlib.Path, ca: ClusterAuthority) -> None:
    tls = ca.followed(role, NAME)
    async with running(tmp_path, **ca.coordinator_options()) as cluster:
        address = cluster.address
        victim = CertifiedAgent(address, "victim", ca.followed(CertRole.WORKER, "victim"))
        await victim.session.start()
        found: dict[tuple[str, Role, bool], str] = {}
        for name in (NAME, f"{NAME}.1", "victim", f"{NAME}2"):
            for part in Role:
                for has_http in (True, False):
                    asked = register(address, name, tls, role=part, http_url=URL if has_http else "")
                    found[name, part, has_http] = await outcome(asked)
        wanted = {
            key: "ok" if key[0] in (NAME, f"{NAME}.1") and key[1:] in PARTS.get(role, ()) else "forbidden"
            for key in found
        }
        assert found == wanted
        assert await outcome(watch(address, tls)) == ("forbidden" if (role, ControlCall.WATCH) in NOT_FOR else "ok")
        wanted_drain = "forbidden" if (role, ControlCall.DRAIN) in NOT_FOR else "ok"
        assert await outcome(drain(address, b"", "victim", tls=tls)) == wanted_drain
        wanted_acquaint = "forbidden" if (role, ControlCall.ACQUAINT) in NOT_FOR else "ok"
        assert await outcome(acquaint(address, b"", {"victim": ["x"]}, tls=tls)) == wanted_acquaint
        await until(lambda: victim.session.is_draining == (wanted_drain == "ok"), "the order, or none")
        assert victim.states == [True], "nothing that another one asked for disturbed it"
        await victim.session.close()


async def test_the_token_beside_a_certificate_adds_nothing(tmp_path: pathlib.Path, ca: ClusterAuthority) -> None:
    tls = ca.followed(CertRole.METRICS, "m0")
    async with running(tmp_path, **ca.coordinator_options()) as cluster:
        for call in (
            watch(cluster.address, tls, token=cluster.token),
            drain(cluster.address, cluster.token, "x", tls=tls),
            acquaint(cluster.address, cluster.token, {"x": ["y"]}, tls=tls),
        ):
            assert await outcome(call) == "forbidden"


async def test_the_token_alone_is_enough_on_loopback(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path) as cluster:
        await register(cluster.address, "w0", None, token=cluster.token)
        assert await watch(cluster.address, None, token=cluster.token) == []
        with pytest.raises(RefusedError, match="no member"):
            await drain(cluster.address, cluster.token, "absent")
        assert await acquaint(cluster.address, cluster.token, {"absent": ["w0"]}) == {"absent"}
        for call in (
            watch(cluster.address, None),
            register(cluster.address, "w0", None, token=b"wrong-token-0000"),
            acquaint(cluster.address, b"wrong-token-0000", {"absent": ["w0"]}),
        ):
            assert await outcome(call) == "unauthenticated"


async def test_certificates_of_another_cluster_or_of_none_are_no_callers(
    tmp_path: pathlib.Path, ca: ClusterAuthority
) -> None:
    """Signed by the same CA."""
    async with running(tmp_path, **ca.coordinator_options()) as cluster:
        blue = ClusterAuthority(tmp_path / "blue", "blue")
        for name in ("ca.pem", "ca.key"):
            (blue.directory / name).write_bytes((ca.directory / name).read_bytes())
        foreign = blue.followed(CertRole.ROUTER, "r0")
        with pytest.raises(AuthenticationError, match="no coordinator of this cluster"):
            await watch(cluster.address, foreign)
        # A hostile caller shows its certificate to a coordinator of any name.
        with pytest.raises(AuthenticationError, match="the certificate is of cluster blue, not default"):
            await watch(
                cluster.address, ForcedFiles(foreign.files, identity=ca.followed(CertRole.ROUTER, "r0").newest.identity)
            )


async def test_a_key_goes_to_its_two_ends(tmp_path: pathlib.Path, ca: ClusterAuthority) -> None:
    async with running(tmp_path, **ca.coordinator_options()) as cluster:
        names = ("w0", "w1", "w2")
        agents = {name: CertifiedAgent(cluster.address, name, ca.followed(CertRole.WORKER, name)) for name in names}
        for agent in agents.values():
            await agent.session.start()
        await until(lambda: all(set(names) <= agent.keys.keys() | {name} for name, agent in agents.items()), "all")
        keys = {(one, two): agents[one].keys[two] for one in names for two in names if one != two}
        assert all(len(key) == 32 and keys[two, one] == key for (one, two), key in keys.items())
        assert len(set(keys.values())) == 3
        assert len(await watch(cluster.address, ca.followed(CertRole.ROUTER, "r0"))) == 3  # asserts that it has no key
        for agent in agents.values():
            await agent.session.close()


def test_docs_show_the_table() -> None:
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (yes|no) \| (yes|no) \| (yes|no) \|$", page, re.MULTILINE)
    assert {row[0] for row in rows} == set(CertRole)
    for name, registers, watches, drains, acquaints in rows:
        role = CertRole(name)
        assert (watches == "yes") == (ControlCall.WATCH in CALLS[role])
        assert (drains == "yes") == (ControlCall.DRAIN in CALLS[role])
        assert (acquaints == "yes") == (ControlCall.ACQUAINT in CALLS[role])
        assert (registers != "no") == (ControlCall.REGISTER in CALLS[role])
        said = set(re.findall(r"`(\w+)`", registers)) or ({*map(str, Role)} if "any part" in registers else set())
        assert said == {str(part) for part in SERVES.get(role, frozenset()) | JOINS.get(role, frozenset())}


def test_docs_name_tests_that_exist() -> None:
    root = pathlib.Path(__file__).resolve().parents[2]
    threats = (root / "docs" / "security.md").read_text().partition("## Threats")[2]
    known = "".join(page.read_text() for page in (root / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", threats)
    assert len(named) > 5
    assert not [name for name in named if f"def {name}(" not in known]


def test_each_role_that_the_hand_written_table_lacks_is_forbidden_in_the_product_too() -> None:
    assert set(PARTS) == set(SERVES)
    assert {(role, call) for role in CertRole for call in ControlCall if call not in CALLS[role]} >= NOT_FOR


def test_forbidden_is_one_code() -> None:
    assert (ForbiddenError.code, ForbiddenError.retryable) == ("forbidden", False)
