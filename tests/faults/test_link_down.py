"""A link that goes down at every phase of a pull, of a read and of a write, between two hosts that are namespaces."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.faults.phase_fixture import PATIENT_S, RECONNECT_S, SILENCE_S, PhaseFixture
from tests.support.faults.posts import GIVES_UP, PATIENT, TTL_S, PostFixture
from tests.support.faults.remote import Beside, Remote
from tests.support.netns import Namespaces, obstacle

pytestmark = pytest.mark.skipif(bool(obstacle()), reason=obstacle())

each_op = pytest.mark.parametrize("op", ["READ", "WRITE"])


class Hosts:
    """A remote process on one host, and its peers in one process on the other; the proxies are on the first."""

    def __init__(self, namespaces: Namespaces) -> None:
        self.namespaces = namespaces
        self.near: Remote | None = None

    def options(self, end: int) -> dict[str, Any]:
        return {"bind_host": self.namespaces.addresses[end]}

    def make_remote(self, name: str, lanes: list[str], **options: Any) -> Remote:
        return Remote(name, lanes, command=self.namespaces.command(0), **self.options(0), **options)

    def make_near(self, name: str, lanes: list[str], **options: Any) -> Remote | Beside:
        options |= self.options(1)
        if self.near is None:
            self.near = Remote(name, lanes, command=self.namespaces.command(1), **options)
            return self.near
        return Beside(self.near, name, lanes, **options)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Namespaces() as namespaces:
        yield Hosts(namespaces)


@pytest.fixture
def make_fixture(hosts: Hosts) -> Iterator[Callable[[float], PhaseFixture]]:
    made: list[PhaseFixture] = []

    def make(reconnect_s: float) -> PhaseFixture:
        made.append(PhaseFixture("stream", reconnect_s, make_source=hosts.make_remote, make_reader=hosts.make_near))
        return made[0]

    yield make
    for fixture in made:
        fixture.close()


@pytest.fixture
def make_posts(hosts: Hosts) -> Iterator[Callable[..., PostFixture]]:
    made: list[PostFixture] = []

    def make(op: str, limits: dict[str, float]) -> PostFixture:
        ends: dict[str, Any] = {"make_remote": hosts.make_remote, "make_near": hosts.make_near}
        made.append(PostFixture("stream", op, limits, proxies_remote=True, **ends))
        return made[0]

    yield make
    for fixture in made:
        fixture.close()


@pytest.mark.nightly
def test_pulls_when_the_link_comes_back_commit(hosts: Hosts, make_fixture: Callable[[float], PhaseFixture]) -> None:
    """Each side has hung up on the other by then; the pulls go on where they were."""
    fixture = make_fixture(PATIENT_S)
    fixture.begin()
    hosts.namespaces.take_link_down()
    for phase in fixture.phases:
        reader = fixture.readers[phase]
        assert reader.wait_state(fixture.ids[phase], "CONNECTING", phase.done), reader.state(fixture.ids[phase])
    hosts.namespaces.bring_link_up()
    for phase in fixture.phases:
        fixture.proxy(phase, "resume")
    fixture.go_on()
    fixture.expect("committed", time.monotonic())
    fixture.expect_idle()


def test_pulls_when_the_link_stays_down_end_as_peer_gone(
    hosts: Hosts, make_fixture: Callable[[float], PhaseFixture]
) -> None:
    """Their blocks are others' when it is there again."""
    fixture = make_fixture(RECONNECT_S)
    fixture.begin(ttl_s=TTL_S)
    cut_s = time.monotonic()
    hosts.namespaces.take_link_down()
    fixture.expect("peer_gone", cut_s + SILENCE_S)
    fixture.expect_paint()
    hosts.namespaces.bring_link_up()
    hosts.namespaces.wait_carries()
    for phase in fixture.phases:
        fixture.proxy(phase, "resume")
    fixture.look_again()


@pytest.mark.nightly
@each_op
def test_posts_when_the_link_comes_back_commit(hosts: Hosts, make_posts: Callable[..., PostFixture], op: str) -> None:
    fixture = make_posts(op, PATIENT | {"grant_ttl_s": PATIENT_S})
    hosts.namespaces.take_link_down()
    fixture.expect_hung_up()
    hosts.namespaces.bring_link_up()
    fixture.resume()
    fixture.expect_committed()


@each_op
def test_posts_when_the_link_stays_down_end_as_peer_gone(
    hosts: Hosts, make_posts: Callable[..., PostFixture], op: str
) -> None:
    """Both hosts are rid of each other, and their memory is others', before it is there again."""
    fixture = make_posts(op, GIVES_UP)
    cut_s = time.monotonic()
    hosts.namespaces.take_link_down()
    fixture.expect("peer_gone", cut_s + SILENCE_S)
    fixture.expect_over_there(cut_s + max(SILENCE_S, TTL_S), ["done"])
    hosts.namespaces.bring_link_up()
    hosts.namespaces.wait_carries()
    fixture.resume()
    fixture.look_again()
