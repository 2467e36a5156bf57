"""CPU time and memory of a process with all its children, out of ``/proc``. Decides nothing else."""

from __future__ import annotations

import dataclasses
import os
import pathlib

TICKS_A_S = os.sysconf("SC_CLK_TCK")


def _fields(stat: pathlib.Path) -> list[str] | None:
    """The fields after the command's name, from the state on; ``None`` where the process is gone."""
    try:
        return stat.read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None


def tree(pid: int) -> list[int]:
    """``pid`` and all that descend from it."""
    children: dict[int, list[int]] = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        if (fields := _fields(stat)) is not None:
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def cpu_s(pid: int) -> float:
    """User and system time of the tree, and of children of it that have ended."""
    ticks = 0
    for each in tree(pid):
        if (fields := _fields(pathlib.Path(f"/proc/{each}/stat"))) is not None:
            ticks += sum(int(field) for field in fields[11:15])
    return ticks / TICKS_A_S


@dataclasses.dataclass(frozen=True)
class Memory:
    """Of a tree, in KiB. Pages that several processes share are counted for each in ``rss`` and once in ``pss``, where
    they weigh less the more processes outside of the tree share them, too. ``anonymous`` has no pages of files."""

    rss: int = 0
    pss: int = 0
    anonymous: int = 0


def memory(pid: int) -> Memory:
    found = dict.fromkeys(("Rss", "Pss", "Pss_Anon"), 0)
    for each in tree(pid):
        try:
            lines = pathlib.Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for name, _, rest in (line.partition(":") for line in lines[1:]):
            if name in found:
                found[name] += int(rest.split()[0])
    return Memory(found["Rss"], found["Pss"], found["Pss_Anon"])
