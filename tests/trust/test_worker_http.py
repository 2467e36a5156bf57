"""The table of a worker's HTTP over real sockets: every path, by every caller, with certificates and with keys."""

from __future__ import annotations

import asyncio
import datetime
import pathlib
import re
from typing import Any

import httpx
import pytest

from kvxfer.errors import ConfigError
from kvxfer.protocol.leg_keys import leg_key
from kvxfer.rpc import MembershipWatch
from kvxfer.serving.leg_access import LegAccess
from kvxfer.trust import authority
from kvxfer.trust.identity import CertIdentity, CertRole
from kvxfer.trust.permissions import WORKER_HTTP, HttpPart
from kvxfer.types import Role
from tests.support.certificates import Authority
from tests.support.coordinator import running, until
from tests.support.trust import CertifiedAgent, ClusterAuthority
from tests.support.worker_http import HUNG_UP, LET_IN, caller_context, running_worker

pytest.importorskip("cryptography")

MAY = {
    CertRole.ROUTER: {"leg", "look", "metrics", "probe"},
    CertRole.OPERATOR: {"look", "metrics", "probe"},
    CertRole.METRICS: {"metrics", "probe"},
}
"""Written down again, by hand: a row that is added to the product's table by mistake fails here."""
PARTS = tuple(map(str, HttpPart))


@pytest.fixture
def ca(tmp_path: pathlib.Path) -> ClusterAuthority:
    return ClusterAuthority(tmp_path / "ca")


def server(ca: ClusterAuthority, role: CertRole = CertRole.DECODE, name: str = "d0") -> dict[str, Any]:
    """A worker's options."""
    issued = ca.issue(role, name)
    return {
        "role": Role.DECODE,
        "agent_id": "d0",
        "tls_cert_file": str(issued.cert_file),
        "tls_key_file": str(issued.key_file),
        "tls_client_ca_file": ca.ca_file,
    }


def join_files(out: pathlib.Path, *paths: str) -> None:
    out.write_text("".join(pathlib.Path(path).read_text() for path in paths))


def all_of(outcome: str) -> dict[str, set[str]]:
    return {part: {outcome} for part in PARTS}


async def test_each_certificate_at_each_path(
    tmp_path: pathlib.Path, ca: ClusterAuthority, tiny_path: pathlib.Path
) -> None:
    async with running_worker(tiny_path, **server(ca)) as worker:
        for role in CertRole:
            found = await worker.ask_all(context=caller_context(ca.ca_file, ca.issue(role, "me")))
            assert found == {part: {LET_IN if part in MAY.get(role, ()) else "forbidden"} for part in PARTS}, role


async def test_no_certificate_and_wrong_ones(
    tmp_path: pathlib.Path, ca: ClusterAuthority, tiny_path: pathlib.Path
) -> None:
    other = ClusterAuthority(tmp_path / "other")
    blue = ClusterAuthority(tmp_path / "blue", "blue")
    for name in ("ca.pem", "ca.key"):
        (blue.directory / name).write_bytes((ca.directory / name).read_bytes())
    now = datetime.datetime.now(datetime.UTC)
    router = CertIdentity("default", CertRole.ROUTER, "r0")
    ended, later = (
        authority.issue(
            ca.directory, router, hosts=[], days=1, now=now + datetime.timedelta(days=days), out=tmp_path / where
        )
        for days, where in ((-3, "ended"), (3, "later"))
    )
    nameless_ca = Authority(tmp_path, "nameless")
    nameless = nameless_ca.issue("router")
    both = tmp_path / "both.pem"
    join_files(both, ca.ca_file, nameless_ca.cert)
    revoked = tmp_path / "revoked"
    revoked.write_text("kvxfer://default/router/r9\n")
    options = server(ca) | {"tls_client_ca_file": str(both), "revoked_file": str(revoked)}
    async with running_worker(tiny_path, **options) as worker:
        for issued in (None, other.issue(CertRole.ROUTER, "r0"), ended, later):
            assert await worker.ask_all(context=caller_context(ca.ca_file, issued)) == all_of(HUNG_UP)
        without_name = caller_context(ca.ca_file)
        without_name.load_cert_chain(nameless.cert, nameless.key)
        for context in (
            without_name,
            caller_context(ca.ca_file, blue.issue(CertRole.ROUTER, "r0")),
            caller_context(ca.ca_file, ca.issue(CertRole.ROUTER, "r9")),
        ):
            assert await worker.ask_all(context=context) == all_of("unauthenticated")
        plain = f"http://{worker.url.partition('//')[2]}"
        worker.url = plain
        assert await worker.ask("GET", "/live") == HUNG_UP


async def test_a_router_that_is_revoked_is_out_at_once_on_an_open_connection(
    tmp_path: pathlib.Path, ca: ClusterAuthority, tiny_path: pathlib.Path
) -> None:
    revoked = tmp_path / "revoked"
    revoked.write_text("")
    context = caller_context(ca.ca_file, ca.issue(CertRole.ROUTER, "r0"))
    async with (
        running_worker(tiny_path, **server(ca), revoked_file=str(revoked)) as worker,
        httpx.AsyncClient(verify=context, trust_env=False) as client,
    ):
        assert (await client.get(f"{worker.url}/held")).status_code == 200
        revoked.write_text("kvxfer://default/router/r0\n")
        async with asyncio.timeout(10):
            while (await client.get(f"{worker.url}/held")).status_code != 401:
                pass


@pytest.mark.parametrize(("role", "name"), [(CertRole.PREFILL, "d0"), (CertRole.ROUTER, "d0"), (CertRole.DECODE, "d1")])
async def test_a_worker_starts_with_its_own_certificate_only(
    ca: ClusterAuthority, tiny_path: pathlib.Path, role: CertRole, name: str
) -> None:
    with pytest.raises(ConfigError, match=r"tls_cert_file: .* and not of agent d0 for the part decode"):
        async with running_worker(tiny_path, **server(ca, role, name)):
            raise AssertionError("it started")


async def test_keys_of_the_coordinator(tmp_path: pathlib.Path, tiny_path: pathlib.Path) -> None:
    file = tmp_path / "leg-keys"
    file.touch(0o600)
    file.write_text("# of a static fleet\nfirst-key-of-the-file\nsecond-key-of-the-file\n")
    async with running(tmp_path) as cluster:
        joins = {"coordinator": cluster.address, "token_file": str(tmp_path / "token")}
        async with (
            running_worker(tiny_path, **joins, agent_id="w0", leg_key_file=str(file)) as worker,
            MembershipWatch(cluster.address, cluster.token) as watch,
        ):
            other = CertifiedAgent(cluster.address, "w1", None, http_url="http://127.0.0.1:1", token=cluster.token)
            await other.session.start()
            await until(lambda: len(watch.membership.members) == 2, "both workers")
            refs = {member.ref.agent_id: member.ref for member in watch.membership.members}
            own = leg_key(watch.leg_secret, refs["w0"]).hex()
            foreign = leg_key(watch.leg_secret, refs["w1"]).hex()
            assert bytes.fromhex(foreign) in other.session.leg_keys
            let_in = all_of(LET_IN)
            for keys in ((own,), ("first-key-of-the-file",), ("second-key-of-the-file",)):
                assert await worker.ask_all(keys=keys) == let_in
            for keys in (
                *((), ("",), (foreign,), (watch.leg_secret.hex(),), (own.upper(),), (own[:-1],), (own, own)),
                *(("# of a static fleet",), (cluster.token.decode(),), (f"Bearer {own}",)),
            ):
                assert await worker.ask_all(keys=keys) == let_in | {
                    "leg": {"unauthenticated"},
                    "look": {"unauthenticated"},
                }, keys
            await other.session.close()


async def test_before_the_keys_are_known_no_leg_is_taken(tmp_path: pathlib.Path) -> None:
    """A worker serves HTTP before it is registered: a request waits, and then needs the key."""
    served: list[str] = []
    known, keys = asyncio.Event(), [b"the-key-of-this-worker"]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        served.append(scope["path"])

    access = LegAccess(app, keys=lambda: keys if known.is_set() else (), are_known=known)

    async def ask(path: str, *headers: tuple[bytes, bytes]) -> int:
        statuses = [200]

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        await access({"type": "http", "path": path, "method": "GET", "headers": headers}, None, send)  # type: ignore[arg-type]
        return max(statuses)

    assert await ask("/ready") == 200
    without = asyncio.create_task(ask("/held"))
    shown = asyncio.create_task(ask("/held", (b"x-kvxfer-leg-key", keys[0])))
    await asyncio.sleep(0)
    assert served == ["/ready"]
    known.set()
    assert (await without, await shown) == (401, 200)
    assert served == ["/ready", "/held"]


async def test_without_any_of_it_a_worker_on_loopback_asks_nobody(tiny_path: pathlib.Path) -> None:
    async with running_worker(tiny_path) as worker:
        assert await worker.ask_all() == all_of(LET_IN)
        assert await worker.ask_all(keys=("of-no-meaning-here",)) == all_of(LET_IN)


def test_docs_show_the_table() -> None:
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text()
    shown = page.partition("## Workers' HTTP")[2].partition("\n## ")[0]
    [names] = re.findall(r"^\| role at a worker ((?:\| `\w+` )+)\|$", shown, re.MULTILINE)
    columns = re.findall(r"`(\w+)`", names)
    assert set(columns) == set(PARTS)
    rows = re.findall(r"^\| ([\w ]+) \| (yes|no) \| (yes|no) \| (yes|no) \| (yes|no) \|$", shown, re.MULTILINE)
    told = {row[0]: {column for column, may in zip(columns, row[1:], strict=True) if may == "yes"} for row in rows}
    assert told == {str(role): set(map(str, parts)) for role, parts in WORKER_HTTP.items()} | {
        "every other role": set()
    }
    assert {str(role): parts for role, parts in MAY.items()} == {k: v for k, v in told.items() if v}
