"""What one agent tells another so that it can be read and written: NIXL's "metadata" blob. Decides the form and what is
accepted; must never know how the blob travels, nor dial anybody.

One line ``kvxfer-nixl-metadata/1``, then JSON. Whoever holds a blob with connection info may read and write all that
its agent registers: the blob carries a capability, 32 random bytes by which the agent accepts bearer peers. Partial
blobs without connection info carry none, and mean something only to those who have one with it.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import hmac
import json
from typing import Any

from kvxfer.connectors.nixl.dlists import as_name
from kvxfer.connectors.nixl.errors import nixlMismatchError
from kvxfer.errors import InvalidArgumentError
from kvxfer.types import (
    AGENT_ID_PATTERN,
    AgentRef,
    DataAddress,
    Exposure,
    Incarnation,
    Lane,
    MemoryKind,
    RegionRecord,
    check_agent_id,
)

MAGIC = b"kvxfer-nixl-metadata/"
VERSION = 1
BLOB_BYTES_MAX = 64 << 20
REGIONS_MAX = 1 << 17
NAME_BYTES_MAX = 1024
HASHED = "nixl-sha256-"


@dataclasses.dataclass(frozen=True)
class AgentMetadata:
    """One agent as another sees it. ``address`` and ``capability`` are there together, or not at all."""

    name: str
    ref: AgentRef
    records: tuple[RegionRecord, ...]
    is_whole: bool
    """Whether ``records`` are all there are; otherwise they are added to what is known."""
    address: DataAddress | None = None
    capability: bytes = dataclasses.field(default=b"", repr=False)
    empties: frozenset[int] = frozenset()
    """Where rows of no bytes are registered."""

    @property
    def has_connection(self) -> bool:
        return self.address is not None


def wire_id(name: str) -> str:
    """The agent id that stands for a NIXL name in sessions: the name itself where it can be one, else its digest."""
    if AGENT_ID_PATTERN.fullmatch(name) is not None and not name.startswith(HASHED):
        return name
    return HASHED + hashlib.sha256(name.encode()).hexdigest()[:48]


def encode_metadata(metadata: AgentMetadata) -> bytes:
    """The blob that :func:`decode_metadata` reads."""
    incarnation = metadata.ref.incarnation
    values: dict[str, Any] = {
        "name": metadata.name,
        "number": incarnation.number,
        "boot_nonce": incarnation.boot_nonce.hex(),
        "whole": metadata.is_whole,
        "regions": [_from_record(record) for record in metadata.records],
        "empties": sorted(metadata.empties),
        "connection": None,
    }
    if metadata.address is not None:
        address = metadata.address
        values["connection"] = {
            "tcp_host": address.tcp_host,
            "tcp_port": address.tcp_port,
            "unix_path": address.unix_path,
            "host_id": address.host_id,
            "lanes": [lane.value for lane in address.lanes],
            "capability": base64.b64encode(metadata.capability).decode(),
        }
    return MAGIC + b"%d\n" % VERSION + json.dumps(values, separators=(",", ":"), ensure_ascii=True).encode()


def decode_metadata(blob: Any) -> AgentMetadata:
    """What :func:`encode_metadata` wrote. Raises nixlMismatchError for anything else, TypeError where it is no
    bytes."""
    if not isinstance(blob, (bytes, bytearray, memoryview)):
        raise TypeError(f"metadata must be bytes, not {type(blob).__name__}")
    if len(blob) > BLOB_BYTES_MAX:
        raise nixlMismatchError(f"metadata of {len(blob)} bytes is longer than BLOB_BYTES_MAX={BLOB_BYTES_MAX}")
    line, _, text = bytes(blob).partition(b"\n")
    if not line.startswith(MAGIC):
        raise nixlMismatchError(
            "these bytes are no metadata of a kvxfer agent (NIXL's own agents and kvxfer's do not mix: "
            "run both ends on one)"
        )
    if line != MAGIC + b"%d" % VERSION:
        raise nixlMismatchError(f"metadata of version {line[len(MAGIC) :][:16]!r} is not known here, {VERSION} is")
    try:
        return _read(json.loads(text))
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error, InvalidArgumentError) as error:
        raise nixlMismatchError(f"metadata is damaged: {type(error).__name__}: {str(error)[:200]}") from None


def invalidation_proof(capability: bytes, ref: AgentRef) -> bytes:
    """Proves to those who hold an agent's metadata that it comes from the agent itself when it takes them back."""
    message = b"kvxfer nixl invalidate v1\n" + ref.agent_id.encode() + b"\n" + ref.incarnation.boot_nonce
    return hmac.digest(capability, message, "sha256")


_RECORD = (
    "region_id",
    "address",
    "length_bytes",
    "memory",
    "device",
    "can_read",
    "can_write",
    "is_shareable",
    "exposure",
)


def _from_record(record: RegionRecord) -> list[Any]:
    return [getattr(record, name) for name in _RECORD]


def _read(values: Any) -> AgentMetadata:
    name = as_name(values["name"])
    if not 0 < len(name.encode()) <= NAME_BYTES_MAX:
        raise ValueError("an agent's name has 1 to 1024 bytes")
    ref = AgentRef(
        check_agent_id(wire_id(name)), Incarnation(_number(values["number"]), bytes.fromhex(values["boot_nonce"]))
    )
    regions = values["regions"]
    if not isinstance(regions, list) or len(regions) > REGIONS_MAX:
        raise ValueError("too many regions")
    records = tuple(_read_record(region) for region in regions)
    places = values.get("empties", [])
    if not isinstance(places, list) or len(places) > REGIONS_MAX:
        raise ValueError("too many empty regions")
    empties = frozenset(_number(place) for place in places)
    is_whole = values["whole"]
    if not isinstance(is_whole, bool):
        raise TypeError("whole must be true or false")
    connection = values["connection"]
    if connection is None:
        return AgentMetadata(name, ref, records, is_whole, empties=empties)
    texts = [connection[key] for key in ("tcp_host", "unix_path", "host_id")]
    if not all(isinstance(text, str) and len(text.encode()) <= NAME_BYTES_MAX and "\0" not in text for text in texts):
        raise TypeError("a host or path is no text")
    port = _number(connection["tcp_port"])
    if not 0 <= port < 65536:
        raise ValueError("no such port")
    known = {lane.value for lane in Lane}
    lanes = tuple(Lane(lane) for lane in connection["lanes"] if lane in known)
    capability = base64.b64decode(connection["capability"], validate=True)
    if len(capability) != 32:
        raise ValueError("a capability has 32 bytes")
    return AgentMetadata(
        name, ref, records, is_whole, DataAddress(texts[0], port, texts[1], texts[2], lanes), capability, empties
    )


def _read_record(region: Any) -> RegionRecord:
    values = dict(zip(_RECORD, region, strict=True))
    for key in ("region_id", "address", "length_bytes", "device"):
        _number(values[key])
    for key in ("can_read", "can_write", "is_shareable"):
        if not isinstance(values[key], bool):
            raise TypeError(f"{key} must be true or false")
    values["memory"], values["exposure"] = MemoryKind(values["memory"]), Exposure(values["exposure"])
    return RegionRecord(**values)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise TypeError("not a whole number of 64 bits")
    return value
