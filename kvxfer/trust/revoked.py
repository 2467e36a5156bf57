"""Certificates that count no more, from a file that is read again when it changes.

Decides what a line of the file means, and when it counts. A new entry counts at once. An entry that is no longer there
counts until a second look in a row reads the same file: one that is written in place is empty or cut for a moment, and
is then a valid, shorter list. A file that is wrong or gone changes nothing. So neither a mistake in the file nor a look
at the wrong moment lets a revoked one back in. It must never know which connections there are.
"""

from __future__ import annotations

import logging
import re

from kvxfer.errors import ConfigError, InvalidArgumentError
from kvxfer.trust.files import read_file
from kvxfer.trust.identity import CertIdentity

log = logging.getLogger("kvxfer.trust")

SETTING = "revoked_file"
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


def parse(text: str) -> frozenset[str]:
    """Identities (``kvxfer://default/prefill/p0``: all certificates of that name) and fingerprints (64 hex digits, as
    ``kvxfer certs show`` prints: one certificate), one a line. Raises ConfigError that names the line."""
    found = set()
    for number, whole in enumerate(text.splitlines(), 1):
        line = whole.partition("#")[0].strip()
        if not line:
            continue
        printed = line.replace(":", "").lower()
        if _FINGERPRINT.fullmatch(printed) is not None:
            found.add(printed)
            continue
        try:
            found.add(str(CertIdentity.parse(line)))
        except InvalidArgumentError as error:
            raise ConfigError(f"line {number} is no identity and no fingerprint: {error}") from None
    return frozenset(found)


class RevokedList:
    """The newest list. An empty ``path``: none is revoked."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError for a file that is wrong now."""
        self._path = path
        self._seen: bytes | str = b""
        self._entries: frozenset[str] = frozenset()
        """What counts."""
        if path:
            self._seen = read_file(SETTING, path)
            self._entries = self._parse(self._seen)
        self._listed = self._entries
        """What the file said last, where that was a list: what counts if the next look reads the same."""

    def look(self) -> bool:
        """Read the file again; whether other entries count now."""
        if not self._path:
            return False
        try:
            content: bytes | str = read_file(SETTING, self._path)
        except ConfigError as error:
            content = str(error)
        if content == self._seen:
            return self._count(self._listed)
        self._seen = content
        try:
            if isinstance(content, str):
                raise ConfigError(content)
            self._listed = self._parse(content)
        except ConfigError as error:
            log.warning("the list of revoked certificates is not taken, the last one stays: %s", error)
            self._listed = self._entries
            return False
        return self._count(self._entries | self._listed)

    def has(self, identity: CertIdentity, fingerprint: str) -> bool:
        """Whether the holder, or this certificate of it, is revoked."""
        return str(identity) in self._entries or fingerprint in self._entries

    def _count(self, entries: frozenset[str]) -> bool:
        before, self._entries = self._entries, entries
        if before == entries:
            return False
        log.info("%d certificates or names are revoked", len(entries), extra={"paths": self._path})
        return True

    def _parse(self, content: bytes) -> frozenset[str]:
        try:
            return parse(content.decode())
        except UnicodeDecodeError:
            raise ConfigError(f"{SETTING}: {self._path} is not UTF-8") from None
        except ConfigError as error:
            raise ConfigError(f"{SETTING}: {self._path}: {error}") from None

    def __repr__(self) -> str:
        return f"<RevokedList of {len(self._entries)}>"
