"""What kvxfer promises of its speed, as ratios to others, and whether a row holds it.

It decides which promise belongs to which row; the numbers are the project's own bars. It must never know how a ratio
was measured.
"""

from __future__ import annotations

from measure.contenders import COPYING, MAPPED
from measure.rows import Comparison, Row

K, M = 1 << 10, 1 << 20
LIMIT_BAR = 0.9
UCX_BAR = 0.97
CHECKSUMS_BAR = 0.1
"""What part of the speed checksums may take on `stream`."""
PLAIN = "plain TCP"
LIMITS_NAMES = ("memcpy", "process_vm_readv", PLAIN, "plain Unix socket")

Steps = tuple[tuple[int, float], ...]
"""(from this size of blocks on, the bar)."""
PEER_BARS: dict[tuple[str, str], Steps] = {
    ("mapped", "one host"): ((4 * K, 6.0), (16 * K, 3.5), (64 * K, 2.0), (1 * M, 1.3)),
    ("cma", "one host"): ((4 * K, 4.0), (16 * K, 2.0), (64 * K, 1.3), (128 * K, UCX_BAR)),
    ("stream", "one host"): ((4 * K, 8.0), (16 * K, 5.0), (64 * K, 2.5), (1 * M, 2.0)),
    ("stream", "two namespaces"): ((4 * K, 2.0),),
    ("ucx", "one host"): ((4 * K, UCX_BAR),),
}


def bar(row: Row, other: Comparison) -> float | None:
    """The least ratio to ``other`` that is promised in this row; ``None`` where nothing is."""
    if row.via != "post" or row.lists != "prepared" or row.at_once != 1:
        return None
    is_one_thread = row.lane not in COPYING or row.copy_threads == 1
    if other.name in LIMITS_NAMES:
        return LIMIT_BAR if row.lane != "unix" and is_one_thread else None
    if row.lane == MAPPED and not is_one_thread:
        return None
    if row.op != "read" and row.lane != "stream":
        return None
    if other.name == "NIXL tuned":
        return UCX_BAR if row.lane in ("cma", "ucx") else 1.0
    found = None
    for size, least in PEER_BARS.get((row.lane, row.site), ()):
        if row.block_bytes >= size:
            found = least
    return found


def is_held(row: Row, other: Comparison) -> bool | None:
    """Whether the row keeps its bar against ``other``; ``None`` where there is no bar or no figure.

    Over sockets a multiple of a peer is also kept where kvxfer reaches LIMIT_BAR of the plain socket: none can do more.
    """
    least = bar(row, other)
    if least is None or other.error or row.error:
        return None
    if other.ratio.median >= least:
        return True
    plain = next((one for one in row.others if one.name == PLAIN and not one.error), None)
    return row.lane == "stream" and other.name != PLAIN and plain is not None and plain.ratio.median >= LIMIT_BAR
