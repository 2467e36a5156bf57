"""The name in a certificate: ``kvxfer://CLUSTER/ROLE/NAME``, as a URI among its alternative names.

Decides which texts are such a name, and which agents one name speaks for. Pure; it must never know what a name is
allowed to do, or how a certificate is read.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable

from kvxfer.errors import InvalidArgumentError

SCHEME = "kvxfer://"
URI_CHARACTERS_MAX = 256
"""No text that is longer is looked at."""
DEFAULT_CLUSTER = "default"
_CLUSTER = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


class CertRole(enum.StrEnum):
    """What the holder of a certificate is."""

    COORDINATOR = "coordinator"
    PREFILL = "prefill"
    DECODE = "decode"
    WORKER = "worker"
    """Prefill, decode or both."""
    ROUTER = "router"
    TIER = "tier"
    OPERATOR = "operator"
    METRICS = "metrics"


def check_cluster(cluster: str) -> str:
    """Return ``cluster``. Raises InvalidArgumentError unless it is 1 to 32 lower-case letters, digits or ``-``, with
    neither end a ``-``: it is a label of a DNS name too."""
    if _CLUSTER.fullmatch(cluster) is None:
        raise InvalidArgumentError(
            f"a cluster's name is 1 to 32 lower-case letters, digits or '-' within, not {cluster!r:.100}"
        )
    return cluster


def check_name(name: str) -> str:
    """Return ``name``. Raises InvalidArgumentError unless it is 1 to 63 letters, digits, ``_`` or ``-`` and begins with
    a letter or digit. It has no dot: what follows a dot tells the agents of one holder apart."""
    if _NAME.fullmatch(name) is None:
        raise InvalidArgumentError(
            f"a name in a certificate is 1 to 63 letters, digits, '_' or '-', and starts with a letter or digit, "
            f"not {name!r:.100}"
        )
    return name


@dataclasses.dataclass(frozen=True)
class CertIdentity:
    """Whose certificate it is. Raises InvalidArgumentError for a cluster or a name that no URI carries."""

    cluster: str
    role: CertRole
    name: str

    def __post_init__(self) -> None:
        check_cluster(self.cluster)
        check_name(self.name)

    def __str__(self) -> str:
        return f"{SCHEME}{self.cluster}/{self.role}/{self.name}"

    @classmethod
    def parse(cls, uri: str) -> CertIdentity:
        """The identity that ``uri`` spells. Raises InvalidArgumentError for every other text."""
        parts = uri[len(SCHEME) :].split("/")
        if len(uri) > URI_CHARACTERS_MAX or not uri.startswith(SCHEME) or len(parts) != 3:
            raise InvalidArgumentError(f"an identity is {SCHEME}CLUSTER/ROLE/NAME, not {uri!r:.100}")
        cluster, role, name = parts
        if role not in tuple(CertRole):
            raise InvalidArgumentError(f"a certificate's role is one of {', '.join(CertRole)}, not {role!r:.100}")
        return cls(cluster, CertRole(role), name)

    @property
    def coordinator_host(self) -> str:
        """The DNS name that the certificates of this cluster's coordinators have, and no other ones: by it a caller
        knows that it speaks to a coordinator, wherever that one listens."""
        return f"coordinator.{self.cluster}.kvxfer.internal"

    def speaks_for(self, agent_id: str) -> bool:
        """Whether an agent of that id is this holder's: ``NAME`` itself, or ``NAME.`` and more (``p0.1`` is a rank of
        ``p0``)."""
        return agent_id == self.name or agent_id.startswith(f"{self.name}.")


def identity_among(uris: Iterable[str]) -> CertIdentity:
    """The one identity among a certificate's URIs; those of other schemes mean nothing here.

    Raises InvalidArgumentError where there is none, more than one, or a wrong one.
    """
    ours = [uri for uri in uris if uri.startswith(SCHEME)]
    if len(ours) != 1:
        raise InvalidArgumentError(f"a certificate names exactly one {SCHEME} identity, this one {len(ours)}")
    return CertIdentity.parse(ours[0])
