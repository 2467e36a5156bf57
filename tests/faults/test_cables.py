"""A cable that is pulled at every phase of a pull, of a read and of a write, between two hosts that are namespaces."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from far import Beside, Far
from posts import GIVES_UP, PATIENT, TTL_S, PostStage
from stage import PATIENT_S, RECONNECT_S, SILENCE_S, Stage

from kvxfer.testing.netns import Namespaces, obstacle

pytestmark = pytest.mark.skipif(bool(obstacle()), reason=obstacle())

each_op = pytest.mark.parametrize("op", ["READ", "WRITE"])


class Hosts:
    """A far process on one host, and all who deal with it in one process on the other; the gates stand on the first."""

    def __init__(self, namespaces: Namespaces) -> None:
        self.namespaces = namespaces
        self.near: Far | None = None

    def options(self, end: int) -> dict[str, Any]:
        return {"bind_host": self.namespaces.addresses[end]}

    def make_far(self, name: str, lanes: list[str], **options: Any) -> Far:
        return Far(name, lanes, command=self.namespaces.command(0), **self.options(0), **options)

    def make_near(self, name: str, lanes: list[str], **options: Any) -> Far | Beside:
        options |= self.options(1)
        if self.near is None:
            self.near = Far(name, lanes, command=self.namespaces.command(1), **options)
            return self.near
        return Beside(self.near, name, lanes, **options)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Namespaces() as namespaces:
        yield Hosts(namespaces)


@pytest.fixture
def make_stage(hosts: Hosts) -> Iterator[Callable[[float], Stage]]:
    made: list[Stage] = []

    def make(reconnect_s: float) -> Stage:
        made.append(Stage("stream", reconnect_s, make_source=hosts.make_far, make_reader=hosts.make_near))
        return made[0]

    yield make
    for stage in made:
        stage.close()


@pytest.fixture
def make_posts(hosts: Hosts) -> Iterator[Callable[..., PostStage]]:
    made: list[PostStage] = []

    def make(op: str, limits: dict[str, float]) -> PostStage:
        ends: dict[str, Any] = {"make_far": hosts.make_far, "make_near": hosts.make_near}
        made.append(PostStage("stream", op, limits, gates_far=True, **ends))
        return made[0]

    yield make
    for stage in made:
        stage.close()


@pytest.mark.nightly
def test_pulls_and_a_cable_that_comes_back(hosts: Hosts, make_stage: Callable[[float], Stage]) -> None:
    """Each side has hung up on the other by then; the pulls go on where they were."""
    stage = make_stage(PATIENT_S)
    stage.begin()
    hosts.namespaces.pull_cable()
    for phase in stage.phases:
        reader = stage.readers[phase]
        assert reader.wait_state(stage.ids[phase], "CONNECTING", phase.done), reader.state(stage.ids[phase])
    hosts.namespaces.plug_cable()
    for phase in stage.phases:
        stage.gate(phase, "resume")
    stage.go_on()
    stage.expect("committed", time.monotonic())
    stage.expect_idle()


def test_pulls_and_a_cable_that_stays_away(hosts: Hosts, make_stage: Callable[[float], Stage]) -> None:
    """Their blocks are others' when it is there again."""
    stage = make_stage(RECONNECT_S)
    stage.begin(ttl_s=TTL_S)
    cut_s = time.monotonic()
    hosts.namespaces.pull_cable()
    stage.expect("peer_gone", cut_s + SILENCE_S)
    stage.expect_paint()
    hosts.namespaces.plug_cable()
    hosts.namespaces.wait_carries()
    for phase in stage.phases:
        stage.gate(phase, "resume")
    stage.look_again()


@pytest.mark.nightly
@each_op
def test_posts_and_a_cable_that_comes_back(hosts: Hosts, make_posts: Callable[..., PostStage], op: str) -> None:
    stage = make_posts(op, PATIENT | {"grant_ttl_s": PATIENT_S})
    hosts.namespaces.pull_cable()
    stage.expect_hung_up()
    hosts.namespaces.plug_cable()
    stage.resume()
    stage.expect_committed()


@each_op
def test_posts_and_a_cable_that_stays_away(hosts: Hosts, make_posts: Callable[..., PostStage], op: str) -> None:
    """Both hosts are rid of each other, and their memory is others', before it is there again."""
    stage = make_posts(op, GIVES_UP)
    cut_s = time.monotonic()
    hosts.namespaces.pull_cable()
    stage.expect("peer_gone", cut_s + SILENCE_S)
    stage.expect_over_there(cut_s + max(SILENCE_S, TTL_S), ["done"])
    hosts.namespaces.plug_cable()
    hosts.namespaces.wait_carries()
    stage.resume()
    stage.look_again()
