"""The contenders: kvxfer's lanes, the limits under each, and the peers with the settings they are tried with.

It decides the settings: a peer's are those its own documentation names for the case, all are tried before each row and
the fastest is the one compared with. It must never know figures.

NIXL: UCX's defaults (which take cma on one host), and ``UCX_TLS=tcp``; ``num_threads`` of its own, larger TCP segments,
and a short sleep between two looks at the state, which leaves the processor to the other end where cores are few. Its
progress thread can be switched off where a transfer starts, which an engine that serves both ways cannot do: off one
host's TCP that makes much of a difference, and so do two threads of its own: "NIXL tuned", the better of the two,
stands beside NIXL with its defaults.
Mooncake: its connection pool, with more connections (lanes) and larger slices. Plain sockets: windows, bytes a call.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Any

from measure.ends import HERE, Setup

PEERS_VENV = HERE.parent / "build" / "peers-venv"
KVXFER, NIXL, MOONCAKE, LIMITS = "kvxfer", "nixl", "mooncake", "limits"
MAPPED, CMA, STREAM, UNIX, UCX = "mapped", "cma", "stream", "unix", "ucx"
LANES = (MAPPED, CMA, STREAM, UNIX, UCX)
COPYING = (MAPPED, CMA)
"""Whose reads several threads share."""
READ, WRITE = "read", "write"
SMALL, HUGE = "4k", "huge"
PREPARED, ONE_SHOT = "prepared", "one-shot"
PAUSE_US = 50

How = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Option:
    """One contender with one choice of settings."""

    setup: Setup
    how: How
    label: str
    """What was chosen, as the tables show it."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured: everything that a row has besides the size of its blocks."""

    lane: str
    op: str
    pages: str
    lists: str
    at_once: int
    copy_threads: int = 0
    """Of kvxfer's reader; 0: the default, by as many as processors are idle."""


def peers_python() -> str:
    return str(PEERS_VENV / "bin" / "python")


def missing_peers() -> str:
    """Why peers cannot run; empty where they can."""
    return "" if pathlib.Path(peers_python()).exists() else f"no {PEERS_VENV.name}: run `make bench-peers` first"


def kvxfer(case: Case, library: str, via: str = "post", stripes: int = 1) -> list[Option]:
    setup = setup_of(case, library, stripes)
    return [Option(setup, (("lane", case.lane), ("lists", case.lists), ("via", via)), "")]


def setup_of(case: Case, library: str, stripes: int = 1) -> Setup:
    return kvxfer_setup(
        case.pages, library, shared=case.lane == MAPPED, stripes=stripes, copy_threads=case.copy_threads
    )


def kvxfer_setup(pages: str, library: str, *, shared: bool, stripes: int = 1, copy_threads: int = 0) -> Setup:
    settings = (("limits", library), ("shared", shared), ("stripes", stripes), ("copy_threads", copy_threads))
    return Setup(KVXFER, "kvxfer_worker", sys.executable, pages, settings, label="shared" if shared else "")


LIMIT_OF = {MAPPED: "memcpy", CMA: "readv", STREAM: "tcp", UNIX: "unix"}
LIMIT_NAMES = {"memcpy": "memcpy", "readv": "process_vm_readv", "tcp": "plain TCP", "unix": "plain Unix socket"}
WINDOWS = (0, 256 << 10, 1 << 20)
"""Socket buffer sizes; 0 leaves them to the kernel."""
CHUNKS = (256 << 10, 1 << 20)
"""Bytes a call."""


def limits(case: Case, library: str) -> list[Option]:
    """The limit under a lane, on kvxfer's own two pools; empty for a lane that has none here."""
    kind = LIMIT_OF.get(case.lane)
    if kind is None or (case.op == WRITE and kind in ("memcpy", "readv")):
        return []
    setup = setup_of(case, library)
    if kind in ("memcpy", "readv"):
        return [Option(setup, (("limit", kind),), "")]
    return [
        Option(
            setup,
            (("limit", kind), ("window", window), ("chunk", chunk)),
            f"window {show_size(window) if window else 'auto'}, {show_size(chunk)} a call",
        )
        for window in WINDOWS
        for chunk in CHUNKS
    ]


def nixl(case: Case, *, is_tuned: bool = False) -> list[Option]:
    """NIXL over what the lane is compared with: TCP beside ``stream``, its own choice beside the others.

    ``is_tuned``: with a progress thread only where it is needed, at the passive end, or with two threads of its own.
    """
    if case.lane == UNIX:
        return []
    quiet = (("UCX_LOG_LEVEL", "error"), ("UCX_WARN_UNUSED_ENV_VARS", "n"))
    passive = (("progress", "source" if case.op == READ else "destination"),)
    setups = []
    if case.lane == STREAM:
        tcp = (*quiet, ("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "{device}"))
        segments = (("UCX_TCP_TX_SEG_SIZE", "64k"), ("UCX_TCP_RX_SEG_SIZE", "64k"))
        for label, settings, more in (
            ("default", (), ()),
            ("64K segments", (), segments),
            ("2 threads", (("num_threads", 2),), ()),
            ("64K segments, no progress thread", passive, segments),
        ):
            setups.append(nixl_setup(case.pages, (*tcp, *more), settings, f"tcp {label}"))
    else:
        # kvxfer's mapped pools lie on their own kind of pages: NIXL shows its better one beside them.
        for pages in (SMALL, HUGE) if case.lane == MAPPED else (case.pages,):
            label = f"{pages} pages" if case.lane == MAPPED else "default"
            if not is_tuned:
                setups.append(nixl_setup(pages, quiet, (), label))
                continue
            for settings, what in ((passive, "no progress thread"), ((("num_threads", 2),), "2 threads")):
                setups.append(nixl_setup(pages, quiet, settings, f"{label}, {what}"))
    options = []
    for setup in setups:
        can_pause = case.lane == STREAM and not setup.settings
        for pause in (0, PAUSE_US) if can_pause else (0,):
            label = setup.label + (", pauses" if pause else "")
            options.append(Option(setup, (("lists", case.lists), ("pause_us", pause)), label))
    return options


def nixl_setup(pages: str, environment: How, settings: How = (), label: str = "default") -> Setup:
    return Setup(NIXL, "nixl_worker", peers_python(), pages, settings, environment, label)


def mooncake(case: Case) -> list[Option]:
    if case.lane != STREAM:
        return []
    base = (
        ("LD_LIBRARY_PATH", str(PEERS_VENV / "lib-for-mooncake")),
        ("MC_TCP_ENABLE_CONNECTION_POOL", "1"),
        ("MC_FORCE_TCP", "1"),
        # One transfer of 4K blocks is more requests than its queue takes unless told.
        ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535"),
        ("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "65535"),
        ("MC_TCP_ADMISSION_TIMEOUT_MS", "60000"),
    )
    options = []
    for label, more in (
        ("default", ()),
        ("16 connections", (("MC_TCP_LANES_PER_PEER", "16"),)),
        ("1M slices", (("MC_TCP_SLICE_SIZE", str(1 << 20)),)),
    ):
        setup = Setup(MOONCAKE, "mooncake_worker", peers_python(), case.pages, (), (*base, *more), f"tcp pool {label}")
        options.append(Option(setup, (("lists", case.lists),), label))
    return options


def opponents(case: Case, against: list[str], library: str) -> dict[str, list[Option]]:
    """Everybody that kvxfer is compared with in this case, each with all settings to try."""
    found = {}
    if LIMITS in against:
        found[LIMIT_NAMES.get(LIMIT_OF.get(case.lane, ""), "")] = limits(case, library)
    if NIXL in against:
        found["NIXL" if case.lane != STREAM else "NIXL tcp"] = nixl(case)
        if case.lane != STREAM:
            found["NIXL tuned"] = nixl(case, is_tuned=True)
    if MOONCAKE in against:
        found["Mooncake tcp"] = mooncake(case)
    return {name: options for name, options in found.items() if options}


def parse_size(text: str) -> int:
    units = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
    text = text.strip().lower()
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def show_size(size: int) -> str:
    return f"{size >> 20}M" if size % (1 << 20) == 0 else f"{size >> 10}K"
