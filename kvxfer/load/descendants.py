"""The processes that descend from one or are of its session, as /proc shows them. Without /proc none are found."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import time
from collections.abc import Iterable, Iterator


@dataclasses.dataclass(frozen=True)
class Seen:
    """A process as it was seen: its number may be another process's later, its number and start time are not."""

    pid: int
    started_ticks: int

    def is_running(self) -> bool:
        """It is there and no zombie."""
        fields = _stat(self.pid)
        return fields is not None and int(fields[19]) == self.started_ticks and fields[0] not in ("Z", "X")

    def send(self, number: signal.Signals) -> None:
        """Send a signal, where it is still there."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return
        try:
            if self.is_running():
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def descendants(pid: int) -> set[Seen]:
    """All that are below ``pid``; itself is not among them."""
    children: dict[int, list[Seen]] = {}
    for seen, fields in _all():
        children.setdefault(int(fields[1]), []).append(seen)
    found: set[Seen] = set()
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child.pid)
    return found


def in_session(session: int) -> set[Seen]:
    """All of that session, its leader too if it is still there."""
    return {seen for seen, fields in _all() if int(fields[3]) == session}


def lower_groups(processes: Iterable[Seen], nice: int) -> None:
    """Give the session of each process this priority. Where the kernel shares the processors between sessions first
    (autogroups), a process's own counts within its session only. What is not there, or not allowed, stays as it is.
    """
    for seen in processes:
        group = pathlib.Path(f"/proc/{seen.pid}/autogroup")
        for _ in range(5):
            try:
                if f"nice {nice}\n" not in group.read_text():
                    group.write_text(str(nice))
                break
            except BlockingIOError:  # the kernel takes one change in 100 ms
                time.sleep(0.1)
            except OSError:
                break


def _all() -> Iterator[tuple[Seen, list[str]]]:
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        fields = _stat(int(path.name))
        if fields is not None:
            yield Seen(int(path.name), int(fields[19])), fields


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name: state, parent, ...; the start time is the 20th."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
