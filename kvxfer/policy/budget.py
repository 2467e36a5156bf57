"""How much of something may be done beyond what was asked: retries, and prompts that are computed a second time.

Pure: time comes in. It must never know what is counted.
"""

from __future__ import annotations

from kvxfer.errors import ConfigError


class Budget:
    """A bucket of tokens. Each :meth:`earn` adds ``share`` of one, each second ``floor_per_s``; it holds ``burst_s``
    seconds' worth of both, and at least one. It begins full. ``now`` is in seconds, and does not go back.
    """

    def __init__(self, *, share: float, floor_per_s: float, burst_s: float = 10.0) -> None:
        if share < 0 or floor_per_s < 0 or burst_s <= 0:
            raise ConfigError("a budget needs share >= 0, floor_per_s >= 0 and burst_s > 0")
        self._share = share
        self._floor_per_s = floor_per_s
        self._most = max(1.0, floor_per_s * burst_s, share * 100 * burst_s)
        self._tokens = self._most
        self._at: float | None = None

    def earn(self) -> None:
        """Something was asked for that may be repeated."""
        self._tokens = min(self._most, self._tokens + self._share)

    def take(self, now: float) -> bool:
        """Spend one; False where there is none."""
        if self._at is not None:
            self._tokens = min(self._most, self._tokens + max(0.0, now - self._at) * self._floor_per_s)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    @property
    def left(self) -> float:
        return self._tokens
