"""Settings with their defaults, bounds and units. A duration has its unit in its name, and the error of a bound names
the setting."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
from collections.abc import Mapping, Sequence

from kvxfer.errors import ConfigError, InvalidArgumentError
from kvxfer.types import ChecksumMode, EncryptMode, Lane, ProgressMode, check_kind


def check_positive(name: str, value: float, *, maximum: float = math.inf) -> None:
    """Raise ConfigError unless ``0 < value <= maximum``."""
    if not 0 < value <= maximum:
        at_most = "" if maximum == math.inf else f" and at most {maximum:.15g}"
        raise ConfigError(f"{name} must be above 0{at_most}, not {value!r}")


def check_kinds(config: AgentConfig) -> None:
    """Raise ConfigError, naming the setting, unless each is of the kind that its annotation says. A mode may be named
    by its value."""
    kinds: dict[str, type] = {"str": str, "bool": bool, "int": int, "float": float}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        kind = str(field.type).partition("[")[0]
        if kind == "tuple":
            is_list = not isinstance(value, (str, bytes)) and isinstance(value, Sequence)
            if not is_list or not all(lane in tuple(Lane) for lane in value):
                raise ConfigError(f"{field.name} must be a list of {', '.join(Lane)}, not {value!r:.100}")
            continue
        try:
            check_kind(field.name, value, kinds.get(kind, str))
        except InvalidArgumentError as error:
            raise ConfigError(str(error)) from None


def checksum_mode(name: str, value: str) -> ChecksumMode:
    """The mode of that name. Raises ConfigError where there is none."""
    if value not in tuple(ChecksumMode):
        raise ConfigError(f"{name} must be one of {', '.join(ChecksumMode)}, not {value!r}")
    return ChecksumMode(value)


STRIPES_MAX = 64
COPY_THREADS_MAX = 64
NOTIFICATION_BYTES_MAX = (16 << 20) + 8192
"""The core's bound: 16 MiB, and what a connector adds to them."""


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


def check_coordinator_files(ca_file: str, cert_file: str, key_file: str) -> None:
    """Raise ConfigError for a certificate without CAs, or the reverse, or a key without a certificate."""
    if bool(ca_file) != bool(cert_file):
        raise ConfigError("coordinator_cert_file and coordinator_ca_file go together")
    if key_file and not cert_file:
        raise ConfigError("coordinator_key_file needs coordinator_cert_file")


def addresses(value: str) -> tuple[str, ...]:
    """The addresses in ``host:port,host:port``; repeated ones count once."""
    return tuple(dict.fromkeys(part.strip() for part in value.split(",")))


def check_addresses(name: str, value: str) -> None:
    """Raise ConfigError unless ``value`` is ``host:port``, or several with commas between them."""
    for address in addresses(value):
        check_address(name, address)


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


ENCRYPT_VARIABLE = "KVXFER_ENCRYPT"


def encrypt_mode(configured: EncryptMode, environ: Mapping[str, str]) -> EncryptMode:
    """The mode of everything in a process: ``KVXFER_ENCRYPT`` has precedence over the ``configured`` one.

    Raises ConfigError for a word that is no mode.
    """
    word = environ.get(ENCRYPT_VARIABLE, "").strip().lower()
    if word and word not in tuple(EncryptMode):
        raise ConfigError(f"{ENCRYPT_VARIABLE} must be one of {', '.join(EncryptMode)}, not {word!r}")
    return EncryptMode(word) if word else configured


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
    """Where the native core listens. Anything but loopback needs ``insecure`` if sessions cannot be encrypted."""
    bind_port: int = 0
    advertise_host: str = ""
    """The host that peers dial, if it differs from ``bind_host`` (containers). Empty: ``bind_host``."""
    insecure: bool = False
    """Accept sessions with other hosts that are not encrypted: where ``encrypt`` is ``never``, or ``auto`` and there is
    no OpenSSL."""
    encrypt: EncryptMode = EncryptMode.AUTO
    """``KVXFER_ENCRYPT`` in the environment has precedence."""
    openssl_library: str = ""
    """``libssl.so.3``, or a file; ``KVXFER_OPENSSL_LIBRARY`` has precedence. Empty: as the loader finds it. Loaded for
    the first session that is encrypted, or at the start of an agent that listens beyond loopback."""
    discovery: bool = False
    """Without a coordinator: know the agents whose signed metadata the application passes on, and admit every peer that
    proves the cluster token."""
    lanes: tuple[Lane, ...] = DEFAULT_LANES
    """Allowed lanes, best first. ``KVXFER_LANES`` in the environment narrows them: see :func:`operator_lanes`."""
    calibrate: bool = True
    """Try the fastest lane of the pair so far first; otherwise ``lanes`` gives the order."""
    coordinator_ca_file: str = ""
    """PEM file with the CAs of the coordinator's certificate. Empty: no TLS, and the cluster token says who this is."""
    coordinator_cert_file: str = ""
    """PEM file with this process's certificate, which names it: ``kvxfer://CLUSTER/ROLE/NAME`` for agents ``NAME`` and
    ``NAME.`` with more behind it. Read again when it changes."""
    coordinator_key_file: str = ""
    """PEM file with its key. Empty: the certificate's file has it."""
    runtime_dir: str = ""
    """Directory (0700) for the Unix socket; empty: ``$XDG_RUNTIME_DIR/kvxfer`` or a private temporary one."""
    ucx_library: str = ""
    """``libucp.so.0``, or a directory that has it; ``KVXFER_UCX_LIBRARY`` has precedence. Empty: the system's, else
    that of the ``libucx`` wheel. Used only if ``ucx`` is among the lanes."""
    ucx_tls: str = ""
    """UCX's transports, as in ``UCX_TLS``; ``KVXFER_UCX_TLS`` has precedence. Empty: ``UCX_TLS``, else all but tcp."""
    grant_ttl_s: float = 10.0
    grant_lifetime_max_s: float = 600.0
    """Renewals do not extend a grant beyond this age."""
    grant_wait_s: float = 600.0
    """How long a pull waits for its grant if its request names no ``timeout_s``, and at most how long a peer's pull may
    wait here."""
    unknown_wait_s: float = 2.0
    """A pull whose prompt was never given to the engine here ends as ``grant_unknown`` after this time, if the engine
    has read its queue twice meanwhile or was idle."""
    engine_silent_s: float = 10.0
    """A pull ends as ``peer_gone`` if its source's engine has work and makes no step for this time."""
    pull_wait_count_max: int = 1024
    transfer_deadline_s: float = 120.0
    """Counted from the moment in which the transfer learns of its grant."""
    stall_s: float = 1.0
    """A live transfer that hears nothing for this time asks again."""
    reconnect_s: float = 3.0
    """How long a transfer tries to reach its source before it fails with ``peer_gone``. A TCP connect without an answer
    is repeated after half of this, at least .5 s and at most 1.5 s."""
    grants_max: int = 65536
    transfers_max: int = 65536
    stripes: int = 1
    """Connections to one peer over which its transfers, and the parts of a large post, may be spread (lanes ``stream``
    and ``unix``)."""
    copy_threads: int = 0
    """Threads that copy large reads (lanes ``mapped`` and ``cma``), including the agent's own; at most
    COPY_THREADS_MAX. 0: one for every four processors, more while others are idle, at most four."""
    progress: ProgressMode = ProgressMode.THREAD
    """Which threads move the agent's bytes."""
    post_checksum: ChecksumMode = ChecksumMode.OFF
    """Which posts over registered memory carry checksums; only ``stream`` and ``unix`` can."""
    notifications_max: int = 1024
    """Unacknowledged notifications to one peer."""
    notification_bytes_max: int = 65536
    """At most NOTIFICATION_BYTES_MAX."""
    notification_queue_bytes_max: int = 64 << 20
    """Bytes of the notifications that wait for one peer, and of those that its running posts will deliver."""
    refusals_max: int = 64
    """A session ends after so many refused requests of its peer. 1, for a server of unregistered peers: the first
    refusal ends it. Then one outdated descriptor of an honest peer interrupts all transfers of its process here, which
    continue in another session. docs/adr/0014-refusals-and-sessions.md."""

    def __post_init__(self) -> None:
        check_kinds(self)
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
        checksum_mode("post_checksum", self.post_checksum)
        check_coordinator_files(self.coordinator_ca_file, self.coordinator_cert_file, self.coordinator_key_file)
        if self.encrypt not in tuple(EncryptMode):
            raise ConfigError(f"encrypt must be one of {', '.join(EncryptMode)}, not {self.encrypt!r}")
        if not self.lanes:
            raise ConfigError("lanes must name at least one lane")
        if not 0 <= self.bind_port < 65536:
            raise ConfigError(f"bind_port must be 0 to 65535, not {self.bind_port}")


@dataclasses.dataclass(frozen=True)
class CoordinatorConfig:
    """How the coordinator keeps its members."""

    heartbeat_s: float = 1.0
    suspect_after_s: float = 1.5
    """A member that is silent for this time gets no new work."""
    dead_after_s: float = 3.0
    """A member that is silent for this time is gone, and its grants as a reader end everywhere."""
    members_max: int = 16384
    heartbeats_a_s_max: float = 2000.0
    """Heartbeats of all agents together in a second: with more agents than that, each is told a longer interval."""

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "suspect_after_s", "dead_after_s"):
            check_positive(name, getattr(self, name), maximum=3600.0)
        check_positive("members_max", self.members_max, maximum=1 << 20)
        check_positive("heartbeats_a_s_max", self.heartbeats_a_s_max, maximum=1e6)
        if not self.heartbeat_s < self.suspect_after_s < self.dead_after_s:
            raise ConfigError(
                "heartbeat_s < suspect_after_s < dead_after_s must hold, "
                f"not {self.heartbeat_s}, {self.suspect_after_s}, {self.dead_after_s}"
            )
