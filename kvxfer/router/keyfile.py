"""The keys that a file names: one a line, or YAML or JSON with a name and limits for each holder.

Decides what such a file may say, and says where it is wrong without a word of what stands there: it may be a key. It
must never know when the file is read, nor what a limit means.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import re
from typing import Any

from kvxfer.errors import ConfigError
from kvxfer.observe import hide
from kvxfer.policy.keylimits import KeyLimits

log = logging.getLogger("kvxfer.router")

FILE_BYTES_MAX = 4 << 20
KEYS_MAX = 1024
KEY_CHARS_MAX = 1024
MODELS_MAX = 1024
UNNAMED = "unnamed"
"""What metrics and logs call every key of the plain form."""

LIMITS = tuple(field.name for field in dataclasses.fields(KeyLimits))
TOP_KEYS = ("keys", "defaults")
DEFAULT_KEYS = (*LIMITS, "models")
HOLDER_KEYS = ("name", "key", "sha256", *DEFAULT_KEYS)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_IN_NO_KEY = re.compile(r"\s|^[\[{]|:$")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


@dataclasses.dataclass(frozen=True)
class KeyEntry:
    """The keys of one holder, as their SHA-256, and what it may do with them."""

    name: str
    digests: tuple[bytes, ...]
    limits: KeyLimits = dataclasses.field(default_factory=KeyLimits)
    models: frozenset[str] | None = None
    """None: all."""

    def __repr__(self) -> str:
        return f"KeyEntry({self.name!r}, keys={len(self.digests)})"


def digest_of(key: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key).digest()


def plain_entry(key: str) -> KeyEntry:
    """The holder of one key without a name or a limit."""
    hide(key)
    return KeyEntry(UNNAMED, (digest_of(key.encode()),))


def read_key_file(path: str) -> tuple[KeyEntry, ...]:
    """The holders that a file names. Raises ConfigError for a file without keys, or one that is wrong."""
    try:
        with pathlib.Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(FILE_BYTES_MAX + 1)
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"cannot read API keys from {path}: {reason}") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: more than {FILE_BYTES_MAX} bytes")
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    entries = _structured(path, text) if _is_structured(lines) else tuple(map(plain_entry, _plain(path, lines)))
    if not entries:
        raise ConfigError(f"{path} holds no API key")
    if sum(len(entry.digests) for entry in entries) > KEYS_MAX:
        raise ConfigError(f"{path} holds more than {KEYS_MAX} keys")
    if status.st_mode & 0o007:  # it is no error: a mounted secret is so by default
        log.warning(
            "a file of keys may be read by others", extra={"path": path, "mode": f"{status.st_mode & 0o777:04o}"}
        )
    return entries


def _is_structured(lines: list[str]) -> bool:
    first = lines[0] if lines else ""
    return first in ("---", "{") or re.match(r'(?:keys|defaults):|\{\s*"(?:keys|defaults)"', first) is not None


def _plain(path: str, lines: list[str]) -> list[str]:
    if max(map(len, lines), default=0) > KEY_CHARS_MAX:
        raise ConfigError(f"{path} holds a key of more than {KEY_CHARS_MAX} characters")
    if any(_IN_NO_KEY.search(line) for line in lines):  # as lines of YAML they would be keys that can be guessed
        raise ConfigError(f"{path}: a key has no blank within; a file of YAML or JSON begins with keys: or defaults:")
    return lines


def _structured(path: str, text: str) -> tuple[KeyEntry, ...]:
    top = _mapping(path, "the file", _loaded(path, text), TOP_KEYS)
    defaults = _mapping(path, "defaults", top.get("defaults") or {}, DEFAULT_KEYS)
    listed = top.get("keys")
    if not isinstance(listed, list):
        raise ConfigError(f"{path}: keys must be a list")
    entries: dict[str, KeyEntry] = {}
    digests: set[bytes] = set()
    for number, one in enumerate(listed, 1):
        where = f"key {number}"
        entry = _entry(path, where, _mapping(path, where, one, HOLDER_KEYS), defaults)
        if entry.name in entries:
            raise ConfigError(f"{path}: {where} has a name that another one has; one holder may list several keys")
        if not digests.isdisjoint(entry.digests):
            raise ConfigError(f"{path}: {where} has a key that another one has")
        entries[entry.name] = entry
        digests.update(entry.digests)
    return tuple(entries.values())


def _loaded(path: str, text: str) -> Any:
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            line = f" in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
            raise ConfigError(f"{path}: no JSON{line}") from None
    import yaml  # only where a file of that form is read

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # in C: the event loop waits
        def flatten_mapping(self, node: Any) -> None:
            """Without merges (``<<``), by which a short text becomes a mapping of any size."""

    try:
        return yaml.load(text, Loader)
    except Exception as error:  # also IndexError, KeyError, AttributeError: of values that do not fit their tags
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f" in line {mark.line + 1}"
        raise ConfigError(f"{path}: no YAML{line}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError
    return dict(pairs)


def _entry(path: str, where: str, values: dict[str, Any], defaults: dict[str, Any]) -> KeyEntry:
    name = values.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConfigError(f"{path}: {where} needs a name of 1 to 64 letters, digits and . _ @ -")
    where = f"{where} ({name})"
    digests = []
    for key in _texts(path, f"{where}: key", values.get("key")):
        if not 0 < len(key) <= KEY_CHARS_MAX or key != key.strip():
            raise ConfigError(f"{path}: {where}: a key has 1 to {KEY_CHARS_MAX} characters and no blank at its ends")
        hide(key)
        digests.append(digest_of(key.encode()))
    for digest in _texts(path, f"{where}: sha256", values.get("sha256")):
        if _SHA256.fullmatch(digest) is None:
            raise ConfigError(f"{path}: {where}: sha256 must be 64 hexadecimal digits")
        hide(digest)
        digests.append(bytes.fromhex(digest))
    if not digests:
        raise ConfigError(f"{path}: {where} needs a key or the sha256 of one")
    merged = {**defaults, **values}
    models = merged.get("models")
    return KeyEntry(
        name,
        tuple(dict.fromkeys(digests)),
        _limits(path, where, merged),
        None if models is None else frozenset(_texts(path, f"{where}: models", models)),
    )


def _limits(path: str, where: str, values: dict[str, Any]) -> KeyLimits:
    given: dict[str, Any] = {}
    for name in LIMITS:
        value = values.get(name)
        if value is None:
            continue
        kinds: tuple[type, ...] = (int,) if name == "max_inflight" else (int, float)
        if type(value) not in kinds:
            raise ConfigError(f"{path}: {where}: {name} must be a number")
        given[name] = value
    try:
        return KeyLimits(**given)
    except ConfigError as error:
        raise ConfigError(f"{path}: {where}: {error}") from None


def _texts(path: str, what: str, value: Any) -> list[str]:
    """One text, or a list of them; None is an empty one."""
    listed = [] if value is None else value if isinstance(value, list) else [value]
    if len(listed) > MODELS_MAX or not all(isinstance(one, str) for one in listed):
        raise ConfigError(f"{path}: {what} must be text, or a list of texts")
    if any("\ud800" <= letter <= "\udfff" for one in listed for letter in one):
        raise ConfigError(f"{path}: {what} has half a character")
    return listed


def _mapping(path: str, what: str, value: Any, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {what} must be a mapping")
    if not set(value) <= set(names):
        raise ConfigError(f"{path}: {what} has an unknown member; it may have {', '.join(names)}")
    return value
