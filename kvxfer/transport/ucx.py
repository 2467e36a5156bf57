"""Which UCX library a process uses, by which transports, and what stands in the way.

It decides where libucp is looked for and how the operator's settings for it are read. It must never load one before the
``ucx`` lane is allowed, because a loaded UCX stays: it starts a thread and patches the memory functions of the process.

A library that the operator names is the only candidate: ``KVXFER_UCX_LIBRARY`` in the environment, else
``AgentConfig.ucx_library``. If it is not there, the lane has an obstacle, and no other library is taken. Where none is
named, the candidates are the system's libraries and that of an installed ``libucx`` wheel (``pip install
kvxfer[ucx]``). The one that can use most kinds of this host's hardware is taken: distributions build UCX without CUDA,
wheels are built without verbs and so have no RDMA. Among equals the system's goes first.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

from kvxfer._native import _core
from kvxfer.config import DEFAULT_LANES, LANES_VARIABLE, AgentConfig, operator_lanes
from kvxfer.types import Lane

LIBRARY_VARIABLE = "KVXFER_UCX_LIBRARY"
TLS_VARIABLE = "KVXFER_UCX_TLS"
SONAME = "libucp.so.0"
LOADER_CACHE = pathlib.Path("/etc/ld.so.cache")
NVIDIA_DRIVER = pathlib.Path("/dev/nvidiactl")
INFINIBAND = pathlib.Path("/sys/class/infiniband")
SYSTEM_DIRECTORIES = ("/usr/local/lib", "/usr/lib", "/usr/lib64", "/lib64", "/opt/ucx/lib", "/opt/hpcx/ucx/lib")


@dataclasses.dataclass(frozen=True)
class UcxLibrary:
    """A libucp, or (``path`` empty) why there is none."""

    path: str
    origin: str
    """``environment``, ``configuration``, ``system`` or ``wheel``; empty where there is none."""
    looked_at: tuple[str, ...]

    @property
    def has_verbs(self) -> bool:
        """Whether it was built with RDMA: its verbs module lies beside it."""
        return bool(self.path) and any(pathlib.Path(self.path).parent.glob("ucx/libuct_ib.so*"))

    @property
    def has_gpu(self) -> bool:
        """Whether it was built with CUDA and this host has a driver for it."""
        return self.has_cuda_module and NVIDIA_DRIVER.exists()

    @property
    def uses(self) -> int:
        """How many kinds of this host's hardware it can use: RDMA devices, GPUs."""
        has_rdma = self.has_verbs and any(INFINIBAND.glob("*"))
        return int(has_rdma) + int(self.has_gpu)

    @property
    def has_cuda_module(self) -> bool:
        """Whether it was built with CUDA."""
        return bool(self.path) and any(pathlib.Path(self.path).parent.glob("ucx/libuct_cuda.so*"))


@dataclasses.dataclass(frozen=True)
class UcxReport:
    """What a UCX can do here. Loading it was needed to say so."""

    library: UcxLibrary
    obstacle: str
    """Why the lane cannot be used; empty: it can."""
    version: str = ""
    transports: tuple[str, ...] = ()
    rdma_obstacle: str = ""
    """Why there is no RDMA; empty: there is."""
    cuda_obstacle: str = ""
    """Why it cannot move device memory; empty: it can."""

    def __str__(self) -> str:
        if self.obstacle:
            return self.obstacle
        parts = [f"UCX {self.version} ({self.library.origin}: {self.library.path}): {', '.join(self.transports)}"]
        parts += [f"no RDMA: {self.rdma_obstacle}"] if self.rdma_obstacle else []
        parts += [f"no CUDA: {self.cuda_obstacle}"] if self.cuda_obstacle else []
        return "; ".join(parts)


def find_library(configured: str = "", environ: Mapping[str, str] | None = None) -> UcxLibrary:
    """Where libucp is, without loading it. ``configured``: a file, or a directory with it in itself or in ``lib``."""
    environ = os.environ if environ is None else environ
    named = environ.get(LIBRARY_VARIABLE, "") or configured
    if named:
        origin = "environment" if environ.get(LIBRARY_VARIABLE, "") else "configuration"
        for candidate in (pathlib.Path(named), pathlib.Path(named, SONAME), pathlib.Path(named, "lib", SONAME)):
            if candidate.is_file():
                return UcxLibrary(str(candidate.absolute()), origin, (named,))
        return UcxLibrary("", "", (named,))
    looked_at: list[str] = []
    found: list[UcxLibrary] = []
    for path, origin in [(path, "system") for path in _system_paths(environ)] + [(_wheel_path(), "wheel")]:
        if path is None:
            looked_at.append("the libucx wheel (not installed)")
            continue
        looked_at.append(str(path))
        if path.is_file():
            found.append(UcxLibrary(str(path), origin, tuple(looked_at)))
    return max(found, key=lambda library: library.uses, default=UcxLibrary("", "", tuple(looked_at)))


def transports(configured: str = "", environ: Mapping[str, str] | None = None) -> str:
    """UCX_TLS as our context is to have it; empty leaves it to the native core (UCX_TLS, else all but tcp)."""
    environ = os.environ if environ is None else environ
    return environ.get(TLS_VARIABLE, "") or configured


def core_options(
    config: AgentConfig, lanes: Sequence[Lane], environ: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """``(ucx_library, ucx_tls)`` of a core that serves ``lanes``; an empty library keeps UCX out of the process.

    If it was not asked for (the lanes are the default ones, no library is named) it is loaded only if it can do
    what no other lane can: RDMA, or device memory on a host that has a GPU.
    """
    environ = os.environ if environ is None else environ
    if Lane.UCX not in lanes:
        return "", ""
    library = find_library(config.ucx_library, environ)
    is_named = library.origin in ("environment", "configuration")
    is_asked = config.lanes != DEFAULT_LANES or (
        bool(environ.get(LANES_VARIABLE)) and Lane.UCX in operator_lanes(environ)
    )
    if not library.path or not (is_named or is_asked or library.has_verbs or library.has_gpu):
        return "", ""
    return library.path, transports(config.ucx_tls, environ)


def missing(library: UcxLibrary) -> str:
    """Why there is no library, or nothing where there is one."""
    if library.path:
        return ""
    return f"{SONAME} was not found: looked at {', '.join(library.looked_at)}; name it by {LIBRARY_VARIABLE}"


def inspect(config: AgentConfig | None = None, environ: Mapping[str, str] | None = None) -> UcxReport:
    """Load the library that an agent with ``config`` would use and ask it. It stays loaded: for tools, not services."""
    config = AgentConfig() if config is None else config
    library = find_library(config.ucx_library, environ)
    if not library.path:
        return UcxReport(library, missing(library))
    probe = _core.probe_ucx(library.path, tls=transports(config.ucx_tls, environ))
    if probe.obstacle:
        return UcxReport(library, probe.obstacle, probe.version)
    return UcxReport(
        library,
        "",
        probe.version,
        tuple(probe.transports),
        "" if probe.has_rdma else _why_no_rdma(library),
        "" if probe.has_cuda else _why_no_cuda(library),
    )


def _why_no_rdma(library: UcxLibrary) -> str:
    if not library.has_verbs:
        instead = (
            f"install the system's and name it by {LIBRARY_VARIABLE}" if library.origin == "wheel" else "rebuild it"
        )
        return f"this UCX was built without verbs; {instead}"
    if not any(INFINIBAND.glob("*")):
        return "this host (or container) has no RDMA device: /sys/class/infiniband is empty"
    if not any(pathlib.Path("/dev/infiniband").glob("uverbs*")):
        return "the RDMA devices cannot be opened: no /dev/infiniband/uverbs* here (in a container: pass them in)"
    return "UCX found no usable port, or UCX_TLS or UCX_NET_DEVICES leaves it out (ucx_info -d tells)"


def _why_no_cuda(library: UcxLibrary) -> str:
    if not library.has_cuda_module:
        return "this UCX was built without CUDA"
    if not NVIDIA_DRIVER.exists():
        return "this host (or container) has no NVIDIA driver"
    return "UCX found no usable device, or UCX_TLS leaves cuda out (ucx_info -d tells)"


def _system_paths(environ: Mapping[str, str]) -> list[pathlib.Path]:
    directories = [part for part in environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    paths = [pathlib.Path(directory, SONAME) for directory in directories]
    try:
        cache = LOADER_CACHE.read_bytes()
    except OSError:
        cache = b""
    pattern = rb"/[^\0]*/" + re.escape(SONAME.encode()) + rb"(?=\0)"
    paths += [pathlib.Path(os.fsdecode(found)) for found in re.findall(pattern, cache)]
    paths += [pathlib.Path(directory, SONAME) for directory in SYSTEM_DIRECTORIES]
    return list(dict.fromkeys(paths))


def _wheel_path() -> pathlib.Path | None:
    spec = importlib.util.find_spec("libucx")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        return pathlib.Path(location, "lib", SONAME)
    return None
