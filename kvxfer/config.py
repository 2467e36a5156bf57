"""Settings with their defaults, bounds and units. Every duration has its unit in its name; every bound is named in the
error that enforces it."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
from collections.abc import Mapping, Sequence

from kvxfer.errors import ConfigError
from kvxfer.types import ChecksumMode, Lane, ProgressMode


def check_positive(name: str, value: float, *, maximum: float = math.inf) -> None:
    """Raise ConfigError unless ``0 < value <= maximum``."""
    if not 0 < value <= maximum:
        at_most = "" if maximum == math.inf else f" and at most {maximum:.15g}"
        raise ConfigError(f"{name} must be above 0{at_most}, not {value!r}")


def check_checksum_mode(name: str, value: str) -> None:
    """Raise ConfigError unless ``value`` is the text of a ChecksumMode."""
    if value not in tuple(ChecksumMode):
        raise ConfigError(f"{name} must be one of {', '.join(ChecksumMode)}, not {value!r}")


STRIPES_MAX = 64
COPY_THREADS_MAX = 64
NOTIFICATION_BYTES_MAX = (16 << 20) + 8192
"""The core's own bound: 16 MiB, and what a connector puts around them."""


def check_copy_threads(name: str, value: int) -> None:
    """Raise ConfigError unless ``value`` is a number of threads, or 0."""
    if not 0 <= value <= COPY_THREADS_MAX:
        raise ConfigError(
            f"{name} must be 1 to {COPY_THREADS_MAX}, or 0 for as many as processors are idle, not {value!r}"
        )


def check_address(name: str, value: str) -> None:
    """Raise ConfigError unless ``value`` is ``host:port``."""
    host, _, port = value.rpartition(":")
    is_short = port.isascii() and port.isdigit() and len(port) <= 5
    if not host or not (is_short and 0 < int(port) < 65536):
        raise ConfigError(f"{name} must be host:port, not {value!r:.100}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``: a loopback address (an IPv6 one also in brackets), or
    ``localhost``. Any other name counts as reachable from elsewhere.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


DEFAULT_LANES = (Lane.MAPPED, Lane.UCX, Lane.CMA, Lane.UNIX, Lane.STREAM)
LANES_VARIABLE = "KVXFER_LANES"


def operator_lanes(environ: Mapping[str, str]) -> tuple[Lane, ...]:
    """The lanes that ``KVXFER_LANES`` allows to everything in a process: ``stream,ucx``. Unset or empty: all.

    Raises ConfigError for a name that is no lane.
    """
    names = [name.strip().lower() for name in environ.get(LANES_VARIABLE, "").split(",") if name.strip()]
    known = {lane.value: lane for lane in Lane}
    for name in names:
        if name not in known:
            raise ConfigError(f"{LANES_VARIABLE} names {name!r}, which is no lane; lanes are {', '.join(known)}")
    return tuple(dict.fromkeys(known[name] for name in names)) or tuple(Lane)


def allowed_lanes(wanted: Sequence[Lane], environ: Mapping[str, str]) -> tuple[Lane, ...]:
    """``wanted`` as far as the operator allows it, in the order of ``wanted``.

    Raises ConfigError where nothing is left.
    """
    operator = operator_lanes(environ)
    lanes = tuple(lane for lane in dict.fromkeys(wanted) if lane in operator)
    if not lanes:
        raise ConfigError(
            f"{LANES_VARIABLE}={environ.get(LANES_VARIABLE, '')} leaves none of the lanes {', '.join(wanted)}"
        )
    return lanes


@dataclasses.dataclass(frozen=True)
class AgentConfig:
    """How one agent behaves towards its peers."""

    bind_host: str = "127.0.0.1"
    """Where the native core listens; anything but loopback needs ``insecure=True`` until the stream lane has TLS."""
    bind_port: int = 0
    advertise_host: str = ""
    """Host that peers dial, where it differs from ``bind_host`` (containers); empty means ``bind_host``."""
    insecure: bool = False
    introductions: bool = False
    """Without a coordinator: know whoever's sealed card is handed over, and let in whoever holds the cluster token."""
    lanes: tuple[Lane, ...] = DEFAULT_LANES
    """Allowed lanes, best first. ``KVXFER_LANES`` in the environment narrows them: see :func:`operator_lanes`."""
    calibrate: bool = True
    """Try the lane first that was the fastest so far between the pair; without it the order of ``lanes`` rules."""
    runtime_dir: str = ""
    """Directory (0700) for the Unix socket; empty picks ``$XDG_RUNTIME_DIR/kvxfer`` or a private temporary one."""
    ucx_library: str = ""
    """``libucp.so.0``, or a directory that has it; ``KVXFER_UCX_LIBRARY`` goes before it. Empty: the system's, else the
    ``libucx`` wheel's. Looked for only where ``ucx`` is among the lanes."""
    ucx_tls: str = ""
    """UCX's transports, as ``UCX_TLS`` names them; ``KVXFER_UCX_TLS`` goes before it. Empty: ``UCX_TLS``, else all
    but tcp."""
    grant_ttl_s: float = 10.0
    grant_lifetime_max_s: float = 600.0
    """No renewal carries a grant past this age."""
    grant_wait_s: float = 600.0
    """How long a pull waits for its grant where its request names no ``timeout_s``; and how long one of a peer may wait
    here, whatever it names."""
    unknown_wait_s: float = 2.0
    """A pull whose prompt the engine here was never asked for ends as ``grant_unknown`` after so long, in which the
    engine took in its queue twice or was idle."""
    engine_silent_s: float = 10.0
    """A pull whose source's engine has work and made no step for so long ends as ``peer_gone``."""
    pull_wait_count_max: int = 1024
    transfer_deadline_s: float = 120.0
    """Counted from the moment in which the transfer heard of its grant."""
    stall_s: float = 1.0
    """A live transfer that heard nothing for so long asks again."""
    reconnect_s: float = 3.0
    """How long a transfer tries to reach its source before it fails with ``peer_gone``; a TCP connect that is not
    answered is begun anew after half of it, at least .5 s and at most 1.5."""
    grants_max: int = 65536
    transfers_max: int = 65536
    stripes: int = 1
    """Connections to one peer over which its transfers may be spread (lanes ``stream`` and ``unix``), and a large post
    is."""
    copy_threads: int = 0
    """That copy large reads (lanes ``mapped`` and ``cma``), the agent's own among them, at most COPY_THREADS_MAX. 0:
    one for every four processors, and more while others are idle; four at most."""
    progress: ProgressMode = ProgressMode.THREAD
    """Which threads move the agent's bytes."""
    post_checksum: ChecksumMode = ChecksumMode.OFF
    """Which posts over registered memory carry CRC-32Cs; only ``stream`` and ``unix`` have them."""
    notifications_max: int = 1024
    """Unacknowledged notifications to one peer."""
    notification_bytes_max: int = 65536
    """At most NOTIFICATION_BYTES_MAX."""
    notification_queue_bytes_max: int = 64 << 20
    """Of notifications that wait for one peer, and of those that posts to it under way will tell."""
    refusals_max: int = 64
    """A session whose peer asked so often for what is not its own ends. 1, for who serves strangers: the first refusal
    ends it. One stale descriptor of an honest peer then interrupts all that its process has under way here, which goes
    on in another session. docs/adr/0014-refusals-and-sessions.md."""

    def __post_init__(self) -> None:
        for name in (
            "grant_ttl_s",
            "grant_lifetime_max_s",
            "grant_wait_s",
            "unknown_wait_s",
            "engine_silent_s",
            "transfer_deadline_s",
            "stall_s",
            "reconnect_s",
        ):
            check_positive(name, getattr(self, name), maximum=86400.0)
        for name in (
            "pull_wait_count_max",
            "grants_max",
            "transfers_max",
            "notifications_max",
        ):
            check_positive(name, getattr(self, name), maximum=1 << 24)
        check_positive("notification_bytes_max", self.notification_bytes_max, maximum=NOTIFICATION_BYTES_MAX)
        check_positive("notification_queue_bytes_max", self.notification_queue_bytes_max, maximum=1 << 32)
        if self.notification_queue_bytes_max < self.notification_bytes_max:
            raise ConfigError(
                f"notification_queue_bytes_max {self.notification_queue_bytes_max} must be at least "
                f"notification_bytes_max {self.notification_bytes_max}"
            )
        if not 1 <= self.refusals_max <= 1 << 24:
            raise ConfigError(f"refusals_max must be 1 to {1 << 24}, not {self.refusals_max!r}")
        if self.grant_ttl_s > self.grant_lifetime_max_s:
            raise ConfigError(
                f"grant_ttl_s {self.grant_ttl_s} must not exceed grant_lifetime_max_s {self.grant_lifetime_max_s}"
            )
        if not 1 <= self.stripes <= STRIPES_MAX:
            raise ConfigError(f"stripes must be 1 to {STRIPES_MAX}, not {self.stripes!r}")
        check_copy_threads("copy_threads", self.copy_threads)
        if self.progress not in tuple(ProgressMode):
            raise ConfigError(f"progress must be one of {', '.join(ProgressMode)}, not {self.progress!r}")
        check_checksum_mode("post_checksum", self.post_checksum)
        if not self.lanes:
            raise ConfigError("lanes must name at least one lane")
        if not 0 <= self.bind_port < 65536:
            raise ConfigError(f"bind_port must be 0 to 65535, not {self.bind_port}")


@dataclasses.dataclass(frozen=True)
class CoordinatorConfig:
    """How the coordinator keeps its members."""

    heartbeat_s: float = 1.0
    suspect_after_s: float = 1.5
    """A member silent for so long gets no new work."""
    dead_after_s: float = 3.0
    """A member silent for so long is gone: its grants as a reader end everywhere."""
    members_max: int = 4096

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "suspect_after_s", "dead_after_s"):
            check_positive(name, getattr(self, name), maximum=3600.0)
        check_positive("members_max", self.members_max, maximum=1 << 20)
        if not self.heartbeat_s < self.suspect_after_s < self.dead_after_s:
            raise ConfigError(
                "heartbeat_s < suspect_after_s < dead_after_s must hold, "
                f"not {self.heartbeat_s}, {self.suspect_after_s}, {self.dead_after_s}"
            )
