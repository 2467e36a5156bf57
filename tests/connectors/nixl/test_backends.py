"""Which plugins there are, and that a backend that is made does what it is made for."""

from __future__ import annotations

import pytest

from kvxfer.connectors.nixl import nixl_agent
from kvxfer.connectors.nixl.bindings import (
    nixlBackendError,
    nixlInvalidParamError,
    nixlNotFoundError,
    nixlNotSupportedError,
)
from tests.support.nixl.agents import MakeAgent, finish, memory, register, row


def test_backends(make_agent: MakeAgent) -> None:
    with pytest.raises(ValueError, match="name"):
        nixl_agent("")
    agent = make_agent("a", backends=["NOPE", "UCX", "LIBFABRIC"], num_threads=4)
    assert list(agent.backends) == ["UCX", "LIBFABRIC"]
    assert agent.get_backend_params("UCX") == {"num_threads": "4"}
    assert agent.get_plugin_mem_types("UVX") == []
    assert agent.get_plugin_params("UVX") == {}
    assert agent.get_backend_mem_types("UCX") == ["DRAM_SEG"]
    with pytest.raises(nixlNotFoundError):
        agent.create_backend("UVX")
    with pytest.raises(nixlInvalidParamError):
        agent.create_backend("UCX")
    with pytest.raises(KeyError):
        agent.register_memory([(4096, 64, 0, "")], "DRAM", ["POSIX"])
    with pytest.raises(nixlBackendError, match="VRAM"):
        agent.register_memory([(4096, 64, 0, "")], "VRAM")
    with pytest.raises(nixlNotFoundError):
        agent.register_memory([(0, 0, 0, "file")], "FILE")


@pytest.mark.parametrize("plugin", ["POSIX", "GDS", "GDS_MT", "OBJ", "AZURE_BLOB", "HF3FS", "GPUNETIO"])
def test_storage_plugin_is_refused_by_name_when_made(plugin: str, make_agent: MakeAgent) -> None:
    agent = make_agent("a", backends=[plugin])
    assert plugin not in agent.backends
    assert plugin not in agent.get_plugin_list()
    with pytest.raises(nixlNotFoundError, match=f"plugin '{plugin}' is for .*; there are LIBFABRIC"):
        agent.create_backend(plugin, {})
    assert plugin not in agent.backends
    assert (agent.get_plugin_params(plugin), agent.get_plugin_mem_types(plugin)) == ({}, [])
    assert (agent.get_backend_params(plugin), agent.get_backend_mem_types(plugin)) == ({}, [])
    with pytest.raises(nixlNotFoundError, match=plugin):
        agent.agent.getPluginParams(plugin)


def test_every_listed_plugin_moves_memory(make_agent: MakeAgent) -> None:
    for name in make_agent("a", backends=[]).get_plugin_list():
        one, other = make_agent(f"one-{name}", backends=[name]), make_agent(f"other-{name}", backends=[name])
        source, sink = memory(4096, seed=1), memory(4096)
        register(one, source)
        register(other, sink)
        one.add_remote_agent(other.get_agent_metadata())
        ours, theirs = one.get_xfer_descs([row(source)], "DRAM"), one.get_xfer_descs([row(sink)], "DRAM")
        finish(one, one.initialize_xfer("WRITE", ours, theirs, other.name, backends=[name]))
        assert (source == sink).all(), name


def test_a_backend_that_cannot_open_is_not_made(monkeypatch: pytest.MonkeyPatch, make_agent: MakeAgent) -> None:
    agent = make_agent("a", backends=[])
    monkeypatch.setenv("KVXFER_LANES", "pigeon")
    with pytest.raises(nixlInvalidParamError):
        agent.create_backend("UCX")
    monkeypatch.delenv("KVXFER_LANES")
    agent.create_backend("UCX")
    assert agent.get_agent_metadata()


def test_query_memory_is_not_supported(make_agent: MakeAgent) -> None:
    agent = make_agent("a")
    for rows, kind in (([(0, 0, 0, "file")], "FILE"), ([(4096, 64, 0, "")], "DRAM")):
        with pytest.raises(nixlNotSupportedError, match="UCX"):
            agent.query_memory(rows, "UCX", kind)
    with pytest.raises(ValueError, match="NOPE"):
        agent.query_memory([(0, 0, 0, "x")], "NOPE", "FILE")
