"""How long to wait before the next try. Knows neither what is tried nor a clock; randomness comes in as a number."""

from __future__ import annotations

import dataclasses

from kvxfer.errors import ConfigError, InvalidArgumentError

_DOUBLINGS_MAX = 62


@dataclasses.dataclass(frozen=True)
class Backoff:
    """Failure ``n`` waits ``base_s * 2**(n-1)`` seconds, at most ``cap_s``, less up to ``jitter`` of it."""

    base_s: float = 0.05
    cap_s: float = 2.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.base_s <= self.cap_s:
            raise ConfigError(f"backoff needs 0 < base_s <= cap_s, not {self.base_s} and {self.cap_s}")
        if not 0 <= self.jitter <= 1:
            raise ConfigError(f"backoff jitter must be 0 to 1, not {self.jitter}")

    def delay_s(self, failures: int, *, random: float) -> float:
        """Seconds to wait after ``failures`` (>= 1) failures in a row; ``random`` is uniform in [0, 1)."""
        if failures < 1:
            raise InvalidArgumentError(f"failures must be 1 or more, not {failures}")
        if not 0 <= random <= 1:
            raise InvalidArgumentError(f"random must be 0 to 1, not {random}")
        full = min(self.cap_s, self.base_s * 2.0 ** min(failures - 1, _DOUBLINGS_MAX))
        return full * (1.0 - self.jitter * random)
