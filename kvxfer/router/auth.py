"""Which clients may ask: API keys from a file, compared in constant time. Knows nothing of what is asked."""

from __future__ import annotations

import hmac
import pathlib

from kvxfer.errors import ConfigError
from kvxfer.observe import hide
from kvxfer.openai.errors import RequestError

KEYS_MAX = 1024
KEY_CHARS_MAX = 1024


class ApiKeys:
    """The keys that clients may use; no keys at all means that no client is asked for one."""

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        self._keys = tuple(key.encode() for key in keys)
        for key in keys:
            hide(key)

    @classmethod
    def from_file(cls, path: str) -> ApiKeys:
        """Read one key a line (blank lines and ``#`` lines are skipped); raise ConfigError for a file without keys."""
        try:
            lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(f"cannot read API keys from {path}: {reason}") from None
        keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
        if not keys:
            raise ConfigError(f"{path} holds no API key")
        if len(keys) > KEYS_MAX or max(map(len, keys)) > KEY_CHARS_MAX:
            raise ConfigError(f"{path} holds more than {KEYS_MAX} keys, or one of more than {KEY_CHARS_MAX} characters")
        return cls(keys)

    @property
    def is_required(self) -> bool:
        return bool(self._keys)

    def check(self, authorization: str | None) -> None:
        """Raise RequestError (401) unless the header carries a known key, or no key is required."""
        if not self._keys:
            return
        scheme, _, given = (authorization or "").partition(" ")
        presented = given.strip().encode("utf-8", "replace") if scheme.lower() == "bearer" else b""
        is_known = False
        for key in self._keys:
            is_known |= hmac.compare_digest(key, presented)
        if not is_known:
            what = "incorrect API key provided" if presented else "an API key is required: Authorization: Bearer ..."
            raise RequestError(what, status=401, error_code="invalid_api_key")

    def __repr__(self) -> str:
        return f"ApiKeys({len(self._keys)})"
