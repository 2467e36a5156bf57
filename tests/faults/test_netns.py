"""Two hosts and a link: the stream lane over a real network that breaks."""

from __future__ import annotations

import pathlib
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from kvxfer.errors import ConfigError
from tests.support.faults.parties import POISON
from tests.support.faults.phase_fixture import MARGIN_S, PAINT
from tests.support.faults.remote import Remote
from tests.support.netns import Namespaces, obstacle

pytestmark = pytest.mark.skipif(bool(obstacle()), reason=obstacle())

BLOCKS, BLOCK_BYTES = 64, 65536
TOTAL = BLOCKS * BLOCK_BYTES
STALL_S, RECONNECT_S, PATIENT_S = 0.5, 1.0, 30.0
SILENCE_S = 2 * STALL_S + RECONNECT_S
KERNELS_CONTROL = pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
FRAME_BYTES = 4 << 20
"""More than one DATA frame is long: what a cut can cost."""
SLOW_BYTES = 32 << 20


class Hosts:
    def __init__(self, namespaces: Namespaces, reconnect_s: float) -> None:
        self.namespaces = namespaces
        self.source, self.reader = (
            Remote(
                name,
                ["stream"],
                command=namespaces.command(end),
                bind_host=namespaces.addresses[end],
                blocks=BLOCKS,
                block_bytes=BLOCK_BYTES,
                stall_s=STALL_S,
                reconnect_s=reconnect_s,
                grant_ttl_s=3.0,
            )
            for end, name in enumerate(("source", "reader"))
        )
        self.source.fill(5)

    def add_peer(self) -> None:
        self.source.add_peer(self.reader.metadata())
        self.reader.add_peer(self.source.metadata())

    def pull(self, ready: int) -> str:
        """A pull of everything, of which so much has arrived."""
        transfer = secrets.token_hex(16)
        self.source.grant(transfer, list(range(BLOCKS)), ready, 3.0)
        self.reader.pull(transfer, "source", list(range(BLOCKS)))
        assert self.reader.wait_state(transfer, "READING", ready), self.reader.why(transfer)
        return transfer

    def moved(self) -> int:
        return int(self.reader.statistics()["bytes_streamed_in"])

    def close(self) -> None:
        for end in (self.source, self.reader):
            end.close()


@pytest.fixture
def reconnect_s() -> float:
    return PATIENT_S


@pytest.fixture
def hosts(reconnect_s: float) -> Iterator[Hosts]:
    with Namespaces() as namespaces:
        made = Hosts(namespaces, reconnect_s)
        try:
            yield made
        finally:
            made.close()


def wait_until(is_so: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_transfers_between_hosts_commit(hosts: Hosts) -> None:
    hosts.add_peer()
    transfer = secrets.token_hex(16)
    hosts.source.grant(transfer, list(range(BLOCKS)), BLOCKS)
    hosts.reader.pull(transfer, "source", list(range(BLOCKS)))
    assert hosts.reader.outcome(transfer) == "committed"
    assert hosts.reader.is_filled(5)
    assert hosts.moved() == TOTAL
    hosts.source.allocate(1 << 20)
    hosts.reader.allocate(1 << 20)
    hosts.add_peer()
    hosts.source.fill(6, region=0)
    hosts.reader.post("read", "READ", "source", 0, 0)
    assert hosts.reader.outcome("read") == "committed"
    assert hosts.reader.is_filled(6, region=0)
    hosts.reader.paint(POISON, region=0)
    hosts.source.post("write", "WRITE", "reader", 0, 0)
    assert hosts.source.outcome("write") == "committed"
    assert hosts.reader.is_filled(6, region=0)
    assert hosts.source.wait_idle() == hosts.reader.wait_idle() == ""


def expect_kernel_settings(hosts: Hosts) -> None:
    for connection in (*hosts.source.connections(), *hosts.reader.connections()):
        assert connection == {"bounded": 0, "control": KERNELS_CONTROL}


def test_tcp_between_namespaces_of_one_host_keeps_the_kernels_settings_and_sends_without_copies(hosts: Hosts) -> None:
    for party in (hosts.source, hosts.reader):
        party.allocate(8 << 20)
    hosts.add_peer()
    hosts.reader.post("read", "READ", "source", 0, 0)
    assert hosts.reader.outcome("read") == "committed"
    expect_kernel_settings(hosts)
    assert hosts.source.statistics()["bytes_spliced_out"] > 0
    assert hosts.source.statistics()["sessions_tls"] == 0, "one kernel is one host"


def test_tcp_to_another_host_keeps_the_kernels_settings_encrypts_and_copies(hosts: Hosts) -> None:
    for party, other in ((hosts.source, hosts.reader), (hosts.reader, hosts.source)):
        metadata = other.metadata()
        host, port, _, *rest = metadata["address"]
        party.add_peer({**metadata, "address": [host, port, "", *rest]})
    transfer = secrets.token_hex(16)
    hosts.source.grant(transfer, list(range(BLOCKS)), BLOCKS)
    hosts.reader.pull(transfer, "source", list(range(BLOCKS)))
    assert hosts.reader.outcome(transfer) == "committed"
    expect_kernel_settings(hosts)
    assert hosts.source.statistics()["bytes_spliced_out"] == 0
    for party in (hosts.source, hosts.reader):
        assert party.statistics()["sessions_tls"] == party.statistics()["sessions_tcp"] == 1


@pytest.mark.parametrize("end", [0, 1], ids=["source-knows", "reader-knows"])
def test_pull_when_the_link_comes_back_takes_the_other_half_alone(hosts: Hosts, end: int) -> None:
    """Half has arrived; both have hung up on each other; the other half alone goes over the new connection."""
    hosts.add_peer()
    transfer = hosts.pull(BLOCKS // 2)
    hosts.namespaces.take_link_down(end)
    assert hosts.reader.wait_state(transfer, "CONNECTING", BLOCKS // 2)
    hosts.namespaces.bring_link_up(end)
    hosts.source.ready(transfer, BLOCKS, True)
    assert hosts.reader.outcome(transfer) == "committed"
    assert hosts.reader.is_filled(5)
    assert hosts.moved() == TOTAL
    assert hosts.source.wait_idle() == hosts.reader.wait_idle() == ""


@pytest.mark.parametrize("reconnect_s", [RECONNECT_S], ids=["gives-up"])
def test_dial_when_the_link_comes_back_is_repeated_and_commits(hosts: Hosts) -> None:
    """The kernel says what was lost again only after the second in which the reader gives up: it dials anew before."""
    hosts.add_peer()
    transfer = secrets.token_hex(16)
    hosts.source.grant(transfer, list(range(BLOCKS)), BLOCKS, 3.0)
    hosts.namespaces.keep_neighbour()
    hosts.namespaces.take_link_down()
    hosts.reader.pull(transfer, "source", list(range(BLOCKS)))
    wait_until(lambda: hosts.reader.statistics()["dials"] == 1)
    hosts.namespaces.bring_link_up()
    hosts.namespaces.wait_carries()
    assert hosts.reader.outcome(transfer) == "committed", hosts.reader.why(transfer)
    assert hosts.reader.is_filled(5)


def post_slowly(hosts: Hosts, op: str) -> Remote:
    """A post in the middle of a frame, its name is its ``op``; returns the party that asked for it."""
    for party in (hosts.source, hosts.reader):
        party.allocate(SLOW_BYTES)
    hosts.add_peer()
    hosts.source.fill(6, region=0)
    try:
        hosts.namespaces.limit_rate(400)
    except ConfigError as error:
        pytest.skip(str(error))
    poster, peer = (hosts.reader, "source") if op == "READ" else (hosts.source, "reader")
    poster.post(op, op, peer, 0, 0)
    wait_until(lambda: hosts.moved() > SLOW_BYTES // 4)
    return poster


@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_post_when_the_link_comes_back_in_a_frame_commits(hosts: Hosts, op: str) -> None:
    poster = post_slowly(hosts, op)
    hosts.namespaces.take_link_down()
    before = hosts.moved()
    time.sleep(2 * STALL_S)
    assert hosts.moved() - before < 1 << 20, "the link is not down"
    assert poster.state(op)[0] not in ("COMMITTED", "FAILED")
    hosts.namespaces.bring_link_up()
    assert poster.outcome(op, 40.0) == "committed"
    assert hosts.reader.is_filled(6, region=0)
    assert SLOW_BYTES <= hosts.moved() <= SLOW_BYTES + FRAME_BYTES
    assert hosts.source.wait_idle() == hosts.reader.wait_idle() == ""


@pytest.mark.parametrize("op", [pytest.param("READ", marks=pytest.mark.nightly), "WRITE"])
@pytest.mark.parametrize("reconnect_s", [RECONNECT_S], ids=["gives-up"])
def test_post_when_the_link_stays_down_in_a_frame_ends_as_peer_gone(hosts: Hosts, op: str) -> None:
    """Both give up, and write their memory at once; what the link still held lands nowhere when it is there again."""
    poster = post_slowly(hosts, op)
    hosts.namespaces.take_link_down()
    assert poster.outcome(op, SILENCE_S + MARGIN_S) == "peer_gone"
    if op == "WRITE":
        assert hosts.reader.offer("source", SILENCE_S + MARGIN_S) == "FAILED"
    for party in (hosts.reader, hosts.source):
        assert party.wait_idle() == ""
        party.deregister(0)
        party.paint(PAINT, region=0)
    moved = hosts.moved()
    assert SLOW_BYTES // 4 < moved < SLOW_BYTES
    hosts.namespaces.bring_link_up()
    hosts.namespaces.wait_carries()
    again = hosts.pull(1)
    hosts.reader.cancel(again)
    assert hosts.reader.outcome(again) == "cancelled"
    assert hosts.moved() == moved + BLOCK_BYTES
    assert hosts.reader.is_painted(PAINT, region=0)
    assert hosts.source.is_painted(PAINT, region=0)
    assert hosts.source.wait_idle() == hosts.reader.wait_idle() == ""


@pytest.mark.parametrize("reconnect_s", [RECONNECT_S], ids=["gives-up"])
def test_pull_when_the_link_stays_down_ends_as_peer_gone(hosts: Hosts) -> None:
    hosts.add_peer()
    transfer = hosts.pull(BLOCKS // 2)
    cut_s = time.monotonic()
    hosts.namespaces.take_link_down()
    assert hosts.reader.outcome(transfer, SILENCE_S + MARGIN_S) == "peer_gone"
    assert time.monotonic() - cut_s <= SILENCE_S + MARGIN_S
    hosts.reader.paint(0x55)
    assert hosts.reader.wait_idle() == ""
    assert hosts.source.wait_ended(transfer) == "EXPIRED"
    hosts.namespaces.bring_link_up()
    hosts.namespaces.wait_carries()
    assert hosts.source.wait_idle() == ""
    again = hosts.pull(1)
    assert hosts.reader.is_painted(0x55, list(range(1, BLOCKS)))
    hosts.reader.cancel(again)
    assert hosts.reader.outcome(again) == "cancelled"
    assert hosts.source.wait_idle() == ""


def test_namespaces_after_exit_are_removed() -> None:
    with Namespaces() as namespaces:
        names = [namespaces.command(end)[3] for end in range(2)]
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert all(name in listed for name in names)
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in listed for name in names)
