"""A command as on a host that gives it little: no home, nothing to write to, few descriptors, forbidden system calls.

Decides how each restriction is applied: to this very process, which then becomes the command. It works as root and as a
plain user. Where the kernel or a container does not let it, the process exits with NOT_APPLICABLE and says why. It is
run as a script, and imports nothing of kvxfer's, so that what is restricted is the command alone::

    subprocess.run(restricted([sys.executable, "-m", "kvxfer.cli", "doctor"], open_files=64))
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import json
import os
import platform
import resource
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

NOT_APPLICABLE = 125
SYSTEM_CALLS = {
    "x86_64": {"getsockopt": 55, "process_vm_readv": 310, "memfd_create": 319, "pidfd_open": 434},
    "aarch64": {"getsockopt": 209, "process_vm_readv": 270, "memfd_create": 279, "pidfd_open": 434},
}
SO_PEERPIDFD = 77
"""The one option of ``getsockopt`` that a filter forbids: it holds on to a process too, on kernels from 6.5 on."""

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
MOUNT_FLAGS = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}
NEVER_WRITTEN = ("proc", "sysfs", "devpts", "cgroup", "cgroup2", "mqueue", "securityfs", "bpf", "tracefs", "debugfs")
"""File systems that hold no files of users; many of them may not be mounted otherwise."""
PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 22, 24, 38, 47, 4
CAPABILITY_VERSION = 0x20080522
SECCOMP_MODE_FILTER = 2
SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO = 0x7FFF0000, 0x00050000
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
THIRD_ARGUMENT = 16 + 2 * 8
"""Where a filter finds it, after the number of the call, the architecture and the instruction pointer."""

libc = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass(frozen=True)
class Restrictions:
    """What a command does without; the default takes nothing away."""

    user_id: int | None = None
    """Run as this user id, without a passwd entry where no user has it."""
    is_read_only: bool = False
    """Every file system is read-only, /tmp and /dev/shm too."""
    shm_bytes: int | None = None
    """Size of /dev/shm."""
    open_files: int | None = None
    """Soft and hard limit of descriptors."""
    has_capabilities: bool = True
    forbidden: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """System calls (of SYSTEM_CALLS) that fail, each with its errno."""


def restricted(command: Sequence[str], restrictions: Restrictions) -> list[str]:
    """The command line that runs ``command`` (an absolute path first) so; exits with NOT_APPLICABLE where it cannot."""
    return [sys.executable, "-I", __file__, json.dumps(dataclasses.asdict(restrictions)), *command]


def apply(restrictions: Restrictions) -> None:
    """Restrict this process, and whatever it starts, for good."""
    has_mounts = restrictions.is_read_only or restrictions.shm_bytes is not None
    if has_mounts or restrictions.user_id is not None:
        _enter_namespaces(os.geteuid() if restrictions.user_id is None else restrictions.user_id)
    if restrictions.shm_bytes is not None:
        _mount("tmpfs", "/dev/shm", 0, f"size={restrictions.shm_bytes}")
    if restrictions.is_read_only:
        _make_read_only()
    if restrictions.open_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (restrictions.open_files, restrictions.open_files))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        _give_up("this process cannot promise to gain no privileges")
    if not restrictions.has_capabilities:
        _drop_capabilities()
    if restrictions.forbidden:
        _forbid(restrictions.forbidden)


def _give_up(what: str, error: int | None = None) -> NoReturn:
    print(f"{what}: {os.strerror(ctypes.get_errno() if error is None else error)}", file=sys.stderr, flush=True)
    sys.exit(NOT_APPLICABLE)


def _enter_namespaces(user_id: int) -> None:
    """Be ``user_id`` and allowed to mount, in a user namespace of our own."""
    outer_uid, outer_gid = os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
        _give_up("no user namespace can be made")
    maps = (
        ("setgroups", "deny"),
        ("uid_map", f"{user_id} {outer_uid} 1"),
        ("gid_map", f"{user_id} {outer_gid} 1"),
    )
    for name, text in maps:
        try:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        except OSError as failure:
            _give_up("no user can be mapped in a user namespace", failure.errno)
    _mount(None, "/", MS_REC | MS_PRIVATE)


def _mount(kind: str | None, where: str, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (kind or "none", where, kind, data)]
    if libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]) != 0:
        _give_up(f"{where} cannot be mounted otherwise")


def _make_read_only() -> None:
    with open("/proc/self/mounts") as file:
        mounts = [line.split() for line in file]
    for _, escaped, kind, options, *_ in mounts:
        if kind in NEVER_WRITTEN:
            continue
        where = escaped.encode().decode("unicode_escape").encode("latin-1")
        flags = sum(MOUNT_FLAGS.get(option, 0) for option in options.split(",")) | MS_REMOUNT | MS_BIND | MS_RDONLY
        is_done = libc.mount(b"none", where, None, ctypes.c_ulong(flags), None) == 0
        if not is_done and os.access(where, os.W_OK):  # a mount that another one hides is not there for us
            _give_up(f"{where.decode(errors='replace')} cannot be made read-only")


def _drop_capabilities() -> None:
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(header, none) != 0:
        _give_up("capabilities cannot be given up")


def _forbid(calls: Mapping[str, int]) -> None:
    numbers = SYSTEM_CALLS.get(platform.machine())
    if numbers is None:
        _give_up(f"the system calls of {platform.machine()} are not known here", errno.ENOSYS)
    program: list[tuple[int, int, int, int]] = []
    for name, error in calls.items():
        refusal = (RETURN, 0, 0, SECCOMP_RET_ERRNO | error)
        program.append((LOAD, 0, 0, 0))  # the number of the call
        if name == "getsockopt":
            program += [
                (JUMP_IF_EQUAL, 0, 3, numbers[name]),
                (LOAD, 0, 0, THIRD_ARGUMENT),
                (JUMP_IF_EQUAL, 0, 1, SO_PEERPIDFD),
                refusal,
            ]
        else:
            program += [(JUMP_IF_EQUAL, 0, 1, numbers[name]), refusal]
    program.append((RETURN, 0, 0, SECCOMP_RET_ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    described = struct.pack("@HP", len(program), ctypes.addressof(code))
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, described, 0, 0) != 0:
        _give_up("system calls cannot be filtered")


if __name__ == "__main__":
    apply(Restrictions(**json.loads(sys.argv[1])))
    os.execv(sys.argv[2], sys.argv[2:])
