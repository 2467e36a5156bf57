"""Which clients may ask: API keys from a file, compared in constant time. Knows nothing of what is asked."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable

from kvxfer.errors import ConfigError
from kvxfer.observe import hide
from kvxfer.openai.errors import RequestError
from kvxfer.policy.keylimits import KeyLimits, KeyMeter, SharedMeter
from kvxfer.router.headers import API_KEY
from kvxfer.router.keyed import UNKEYED, KeyedRequest, KeyHolder
from kvxfer.router.keyfile import KeyEntry, digest_of, plain_entry, read_key_file


def authorization_in(received: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The key that a request's headers show, as ``Authorization`` has it; None where they show none. Names are in lower
    case. Raises RequestError (401) where they show more than one: which one counts would be this reader's guess.
    """
    shown = []
    for name, value in received:
        if name == b"authorization":
            shown.append(value.decode("latin-1"))
        elif name == API_KEY:
            shown.append(f"Bearer {value.decode('latin-1')}")
    if len(shown) > 1 and len(set(map(_key_in, shown))) > 1:
        what = "the request shows two API keys: Authorization and x-api-key are places of one"
        raise RequestError(what, status=401, error_code="invalid_api_key")
    return shown[0] if shown else None


def _key_in(authorization: str) -> bytes:
    scheme, _, given = authorization.partition(" ")
    return given.strip().encode("utf-8", "replace") if scheme.lower() == "bearer" else b""


class ApiKeys:
    """The keys that clients may use, and what each holder of keys has used of its limits. No keys at all means that no
    client is asked for one. Only their SHA-256 is kept.
    """

    def __init__(self, keys: tuple[str, ...] = (), *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._known: tuple[tuple[bytes, KeyHolder], ...] = ()
        self._shared_of: Callable[[KeyEntry], SharedMeter | None] = lambda entry: None
        self._hidden: set[bytes] = set()
        """Of keys that were used: they are blacked out in logs, also where only their SHA-256 was told."""
        self.entries: tuple[KeyEntry, ...] = ()
        self.on_change: Callable[[], None] = lambda: None
        """Called when there are other keys."""
        self.replace(map(plain_entry, keys))

    @classmethod
    def from_file(cls, path: str, *, with_limits: bool = True) -> ApiKeys:
        """The keys of a file (``router.keyfile``); raise ConfigError for one without keys, or that is wrong."""
        keys = cls()
        keys.load(path, with_limits=with_limits)
        return keys

    def load(self, path: str, *, with_limits: bool = True) -> None:
        """Take the keys of a file in place of those that are known. Raises ConfigError, and then these stay."""
        entries = read_key_file(path)
        if not with_limits and any(entry.limits != KeyLimits() or entry.models is not None for entry in entries):
            raise ConfigError(f"{path}: these keys have neither limits nor models")
        self.replace(entries)

    def replace(self, entries: Iterable[KeyEntry]) -> None:
        """Other holders from now on. One of the same name, or without a name and with the same key, goes on with what
        it has used; what runs for one that is gone ends as it began."""
        before = {holder.identity: holder for _, holder in self._known}
        now = self._now()
        self.entries = tuple(entries)
        kept = {KeyHolder.identity_of(entry) for entry in self.entries}
        for identity, holder in before.items():
            if identity not in kept:
                holder.leave()
        known = []
        for entry in self.entries:
            one, shared = before.get(KeyHolder.identity_of(entry)), self._shared_of(entry)
            if one is None:
                one = KeyHolder(entry, KeyMeter(entry.limits, now, shared), self._now)
            else:
                one.adopt(entry, now, shared)
            known += [(digest, one) for digest in entry.digests]
        self._known = tuple(known)
        self._hidden.clear()
        self.on_change()

    def share(self, shared_of: Callable[[KeyEntry], SharedMeter | None]) -> None:
        """From now on other processes count too for those holders for which ``shared_of`` gives something."""
        self._shared_of = shared_of
        self.replace(self.entries)

    @property
    def is_required(self) -> bool:
        return bool(self._known)

    @property
    def are_some_restricted(self) -> bool:
        """Whether some key is for some models only."""
        return any(entry.models is not None for entry in self.entries)

    def check(self, authorization: str | None) -> KeyHolder | None:
        """The holder of the key in the header; None where no key is required. Raise RequestError (401) for a key that
        is unknown or missing."""
        if not self._known:
            return None
        presented = _key_in(authorization or "")
        digest = digest_of(presented)
        found: KeyHolder | None = None
        for known, holder in self._known:
            if hmac.compare_digest(known, digest):
                found = holder  # and on: the time must not tell which one
        if found is not None and digest not in self._hidden:
            self._hidden.add(digest)
            hide(presented.decode("utf-8", "replace"))
        if found is None or not presented:
            what = (
                "incorrect API key provided"
                if presented
                else "an API key is required: Authorization: Bearer ..., or x-api-key"
            )
            raise RequestError(what, status=401, error_code="invalid_api_key")
        return found

    def enter(self, authorization: str | None) -> KeyedRequest:
        """Begin one request with the key in the header, within its limits; :meth:`KeyedRequest.end` must follow.
        Raises RequestError (401), RateLimitedError (429)."""
        holder = self.check(authorization)
        return UNKEYED if holder is None else holder.enter()

    def check_shown(self, received: Iterable[tuple[bytes, bytes]]) -> KeyHolder | None:
        """As :meth:`check`, with the key that a request's headers show."""
        return self.check(authorization_in(received) if self._known else None)

    def enter_shown(self, received: Iterable[tuple[bytes, bytes]]) -> KeyedRequest:
        """As :meth:`enter`, with the key that a request's headers show."""
        return self.enter(authorization_in(received) if self._known else None)

    def __repr__(self) -> str:
        return f"ApiKeys({len(self._known)})"
