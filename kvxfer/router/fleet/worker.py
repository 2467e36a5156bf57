"""One engine as the router sees it: how it is reached, which words it speaks, and where the router has it from.

Decides how a worker is written on a command line and in a file, and what a worker without a coordinator is called. It
must never know whether the engine answers.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from kvxfer.errors import ConfigError, InvalidArgumentError
from kvxfer.protocol.http_url import HttpUrl
from kvxfer.types import AgentRef, DataAddress, Incarnation, Member, Role, WorkerInfo, check_agent_id

BOOTSTRAP_PORT = 8998
"""Where SGLang's and Mooncake's bootstrap servers listen unless they are told otherwise."""
MODEL_CHARS_MAX = 512


class EngineDialect(enum.StrEnum):
    """What an engine is spoken to in. ``router/dialects`` says how."""

    KVXFER = "kvxfer"
    VLLM_KVXFER = "vllm-kvxfer"
    """vLLM with kvxfer's connector."""
    VLLM = "vllm"
    """vLLM with a connector of its own, such as NixlConnector."""
    VLLM_MOONCAKE = "vllm-mooncake"
    SGLANG = "sglang"
    PLAIN = "plain"
    """One engine that does it all."""


ENGINE_DIALECTS = frozenset(EngineDialect)
CLIPPING_DIALECTS = frozenset({EngineDialect.VLLM_KVXFER, EngineDialect.VLLM, EngineDialect.VLLM_MOONCAKE})
"""Of engines that end an answer where their context ends, whatever was asked for."""
PAIRED_DIALECTS = frozenset({EngineDialect.SGLANG})
"""Of engines whose decode worker computes no prompt itself, whatever it is asked."""
BOOTSTRAPPED_DIALECTS = frozenset({EngineDialect.SGLANG, EngineDialect.VLLM_MOONCAKE})


class WorkerSource(enum.StrEnum):
    """Where a worker comes from. Of two that name the same engine, the earlier one counts."""

    COORDINATOR = "coordinator"
    ADMIN = "admin"
    FLAGS = "flags"
    FILE = "file"
    KUBERNETES = "kubernetes"


@dataclasses.dataclass(frozen=True)
class Worker:
    """One engine behind one address (and data-parallel rank)."""

    member: Member
    """What placement looks at. Its dialect is the worker's; an engine without kvxfer has no pools in it."""
    dialect: str
    source: str
    bootstrap_port: int | None = None
    """Of dialects that meet at a bootstrap server."""
    dp_rank: int | None = None
    """The engine behind an address that several share."""
    ranks: int = 1
    """Agents of the engine; ``member`` is the first."""
    aliases: frozenset[str] = frozenset()
    """Names of models that it serves beside its member's."""
    leg_key: str = dataclasses.field(default="", repr=False)
    """What a router shows to it, where the coordinator says so."""
    addresses: tuple[str, ...] = ()
    """All addresses that its source gives for it; ``url`` is one of them. Empty where there is never more than one."""
    uid: str = ""
    """By which its source tells it from one that had its name before; empty where it does not."""

    @property
    def ref(self) -> AgentRef:
        return self.member.ref

    @property
    def agent_id(self) -> str:
        return self.member.ref.agent_id

    @property
    def url(self) -> str:
        return self.member.info.http_url

    @property
    def stages(self) -> str:
        return self.member.info.stages

    @property
    def tensor_ranks(self) -> int:
        """Agents that divide the heads of one layer."""
        return max(1, self.ranks // self.member.info.stage_count)

    @property
    def has_lease(self) -> bool:
        """Whether the coordinator tells when it is gone, what it serves, and its load."""
        return self.source == WorkerSource.COORDINATOR

    def is_same(self, other: Worker) -> bool:
        """Whether both say the same of the same engine, whatever incarnation was made up for it."""
        return dataclasses.replace(other, member=dataclasses.replace(other.member, ref=self.ref)) == self

    def succeeds(self, other: Worker) -> bool:
        """Whether it is the engine that ``other`` of the same name was, so that it keeps the incarnation: of a source
        that gives several addresses the one with the same uid, or where a uid is missing the one with an address in
        common; of the others only one of which nothing new is said."""
        if not self.addresses:
            return self.is_same(other)
        if self.uid and other.uid:
            return self.uid == other.uid
        return not set(self.addresses).isdisjoint(other.addresses)

    def at(self, url: str) -> Worker:
        """The same worker at another of its addresses."""
        if url == self.url:
            return self
        info = dataclasses.replace(self.member.info, http_url=url)
        return dataclasses.replace(self, member=dataclasses.replace(self.member, info=info))

    def as_of(self, other: Worker) -> Worker:
        """The same worker with the incarnation of ``other``, and at its address where it still has that one."""
        moved = self.at(other.url) if other.url in self.addresses else self
        return dataclasses.replace(moved, member=dataclasses.replace(moved.member, ref=other.ref))


def stock_worker(
    url: str,
    role: Role,
    dialect: str,
    source: str,
    *,
    name: str = "",
    model: str = "",
    bootstrap_port: int | None = None,
    dp_rank: int | None = None,
) -> Worker:
    """A worker that no coordinator knows, with an incarnation of its own. ``model`` may be empty: the engine says it.

    Raises ConfigError for a value that cannot be, by the name of the field.
    """
    if dialect not in ENGINE_DIALECTS:
        raise ConfigError(f"dialect must be one of {', '.join(EngineDialect)}, not {dialect!r:.100}")
    try:
        origin = _origin(url, source)
        agent_id = check_agent_id(name) if name else agent_id_of(origin, dp_rank)
    except InvalidArgumentError as error:
        raise ConfigError(str(error)) from None
    if bootstrap_port is not None and dialect not in BOOTSTRAPPED_DIALECTS:
        raise ConfigError(f"bootstrap_port is for {' and '.join(sorted(BOOTSTRAPPED_DIALECTS))}, not for {dialect}")
    if bootstrap_port is not None and not 0 < bootstrap_port < 65536:
        raise ConfigError(f"bootstrap_port must be 1 to 65535, not {bootstrap_port}")
    if dp_rank is not None and not 0 <= dp_rank < 1 << 16:
        raise ConfigError(f"dp_rank must be 0 to 65535, not {dp_rank}")
    if len(model) > MODEL_CHARS_MAX:
        raise ConfigError(f"model must have at most {MODEL_CHARS_MAX} characters")
    if not model.isprintable():
        raise ConfigError(f"model must be printable text, not {model!a:.200}")
    if bootstrap_port is None and dialect in BOOTSTRAPPED_DIALECTS:
        bootstrap_port = BOOTSTRAP_PORT
    if dialect == EngineDialect.PLAIN:
        role = Role.BOTH
    info = WorkerInfo(agent_id, role, model, origin.origin, dialect=dialect)
    member = Member(
        AgentRef(agent_id, Incarnation(0, secrets.token_bytes(16))),
        info,
        DataAddress("", 0, "", f"host of {origin.host}"),
    )
    return Worker(member, dialect, source, bootstrap_port, dp_rank)


def origin_at(url: str, source: str) -> str:
    """``url`` as a worker of that source is reached. Raises ConfigError where none may be there."""
    try:
        return _origin(url, source).origin
    except InvalidArgumentError as error:
        raise ConfigError(str(error)) from None


def _origin(url: str, source: str) -> HttpUrl:
    """A link-local address is for the command line alone, which the operator of this machine writes: two machines may
    be joined by one wire. A file, a cluster and a client of the admin routes may not name what this machine alone
    sees."""
    origin = HttpUrl.parse("url", url)
    if source != WorkerSource.FLAGS:
        origin.check_routed("url")
    return origin


def agent_id_of(origin: HttpUrl, dp_rank: int | None = None) -> str:
    """What a worker is called that has no name: ``10.0.0.7-8000``, ``decode-1.example-8000-dp3``."""
    host = origin.host.replace(":", ".")
    end = f"-{origin.port}" + ("" if dp_rank is None else f"-dp{dp_rank}")
    if not host[0].isalnum():
        host = f"ip{host}"
    if len(host) + len(end) > 64:
        digest = hashlib.sha256(origin.host.encode()).hexdigest()[:8]
        host = f"{host[: 64 - len(end) - 9]}-{digest}"
    return host + end


KEYS = ("name", "model", "bootstrap_port", "dp_rank", "dialect")
"""What may follow an address after ``?``."""


def read_worker(text: str, role: Role, dialect: str, source: str) -> Worker:
    """A worker as a flag gives it: ``http://host:port``, and after ``?`` any of KEYS as in a query.

    Raises ConfigError for anything else.
    """
    url, mark, query = text.partition("?")
    values: dict[str, Any] = {}
    if mark:
        try:
            pairs = parse_qsl(query, strict_parsing=True, keep_blank_values=True, max_num_fields=len(KEYS))
        except ValueError:
            raise ConfigError(
                f"after ? come {', '.join(KEYS)} as name=value, joined by &, not {query!r:.200}"
            ) from None
        for key, value in pairs:
            if key not in KEYS or key in values:
                what = "is given twice" if key in values else f"is none of {', '.join(KEYS)}"
                raise ConfigError(f"{key!r:.100} in {text!r:.200} {what}")
            values[key] = value
    for key in ("bootstrap_port", "dp_rank"):
        if key in values:
            values[key] = _number(key, values[key])
    return _made(url, role, dialect, source, values)


def _made(url: str, role: Role, dialect: str, source: str, values: Mapping[str, Any]) -> Worker:
    more = dict(values)
    return stock_worker(url, role, more.pop("dialect", dialect), source, **more)


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        raise ConfigError(f"{name} must be a number, not {text!r:.100}")
    return int(text)
