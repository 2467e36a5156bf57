"""How a worker is written, and what it is called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError
from kvxfer.protocol.http_url import HttpUrl
from kvxfer.router.fleet.sources.flags import workers_from_flags
from kvxfer.router.fleet.worker import WorkerSource, agent_id_of, read_worker, stock_worker
from kvxfer.types import AGENT_ID_PATTERN, Role


def test_worker_of_an_address_alone() -> None:
    worker = read_worker("http://10.0.0.7:8000", Role.PREFILL, "vllm", "flags")
    assert (worker.agent_id, worker.url, worker.dialect) == ("10.0.0.7-8000", "http://10.0.0.7:8000", "vllm")
    assert (worker.bootstrap_port, worker.dp_rank, worker.ranks) == (None, None, 1)
    info = worker.member.info
    assert (info.role, info.model, info.dialect, info.http_url) == (Role.PREFILL, "", "vllm", worker.url)
    assert not worker.has_lease


def test_worker_with_all_that_an_address_may_say() -> None:
    text = "https://gpu-1.example?name=p0&model=org/model&bootstrap_port=9000&dp_rank=3&dialect=sglang"
    worker = read_worker(text, Role.DECODE, "vllm", "flags")
    assert (worker.agent_id, worker.url, worker.dialect) == ("p0", "https://gpu-1.example:443", "sglang")
    assert (worker.member.info.model, worker.bootstrap_port, worker.dp_rank) == ("org/model", 9000, 3)


@pytest.mark.parametrize(("dialect", "port"), [("sglang", 8998), ("vllm-mooncake", 8998), ("vllm", None)])
def test_worker_bootstrap_port_has_a_default_where_there_is_one(dialect: str, port: int | None) -> None:
    assert read_worker("http://h:1", Role.PREFILL, dialect, "flags").bootstrap_port == port


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h:1", "url must be http:// or https://"),
        ("http://h:1/v1", "with nothing after it"),
        ("http://u@h:1", "url must be"),
        ("http://h:1?port=1", "'port' in"),
        ("http://h:1?name=a&name=b", "given twice"),
        ("http://h:1?name", "name=value"),
        ("http://h:1?name=-", "agent id"),
        ("http://h:1?dp_rank=x", "dp_rank must be a number"),
        ("http://h:1?dp_rank=70000", "dp_rank must be 0 to 65535"),
        ("http://h:1?bootstrap_port=1", "bootstrap_port is for sglang and vllm-mooncake"),
        ("http://h:1?dialect=sglang&bootstrap_port=0", "bootstrap_port must be 1 to 65535"),
        ("http://h:1?dialect=tgi", "dialect must be one of"),
        ("http://h:1?model=" + "x" * 600, "model must have at most"),
        ("http://h:1?model=a%00b", "model must be printable text"),
        ("http://h:1?" + "&".join(["name=a"] * 20), "name=value"),
    ],
)
def test_worker_that_cannot_be_is_refused_by_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        read_worker(text, Role.PREFILL, "vllm", "flags")


@given(
    st.from_regex(
        r"([a-z0-9]([a-z0-9-]{0,60}[a-z0-9])?\.){0,3}[a-z]{1,60}|[0-9a-f]{1,4}::[0-9a-f]{1,4}|::1", fullmatch=True
    )
)
def test_worker_name_made_of_an_address_is_one(host: str) -> None:
    names = {agent_id_of(HttpUrl("http", host, port), rank) for port in (80, 65535) for rank in (None, 0, 65535)}
    assert len(names) == 6
    assert all(AGENT_ID_PATTERN.fullmatch(name) for name in names)


def test_worker_names_of_long_hosts_differ() -> None:
    hosts = [f"{'x' * 60}.{n}.example" for n in range(20)]
    assert len({agent_id_of(HttpUrl("http", host, 80)) for host in hosts}) == 20


def test_worker_is_the_same_whatever_incarnation_was_made_up() -> None:
    one = stock_worker("http://h:1", Role.DECODE, "vllm", "file")
    assert one.is_same(stock_worker("http://h:1", Role.DECODE, "vllm", "file"))
    assert one.ref != stock_worker("http://h:1", Role.DECODE, "vllm", "file").ref
    assert not one.is_same(stock_worker("http://h:1", Role.PREFILL, "vllm", "file"))
    assert not one.is_same(stock_worker("http://h:1", Role.DECODE, "vllm", "file", model="m"))


def test_flags_name_roles_and_dialects() -> None:
    workers = workers_from_flags(
        prefill=["http://h:1", "http://h:2"],
        decode=["http://h:2", "http://h:3"],
        engine=["http://h:4"],
        dialect="sglang",
    )
    assert [(w.agent_id, w.member.info.role.value, w.dialect, w.bootstrap_port) for w in workers] == [
        ("h-1", "prefill", "sglang", 8998),
        ("h-2", "both", "sglang", 8998),
        ("h-3", "decode", "sglang", 8998),
        ("h-4", "both", "plain", None),
    ]
    assert workers_from_flags() == ()


def test_link_local_address_is_for_the_command_line_alone() -> None:
    """Two machines may be joined by nothing but one wire."""
    for url in ("http://169.254.7.7:8000", "http://[fe80::7]:8000"):
        assert workers_from_flags(decode=[url])[0].url == url
        for source in sorted(set(WorkerSource) - {WorkerSource.FLAGS, WorkerSource.COORDINATOR}):
            with pytest.raises(ConfigError, match="it is link-local"):
                stock_worker(url, Role.DECODE, "vllm", source)
    for url in ("http://169.254.169.254", "http://[::ffff:169.254.169.254]", "http://0.0.0.0:1", "http://[ff02::1]:1"):
        with pytest.raises(ConfigError, match=r"^--decode .* an address that an engine can have"):
            workers_from_flags(decode=[url])


def test_flags_that_cannot_be_are_refused_by_their_name() -> None:
    with pytest.raises(ConfigError, match=r"^--decode h:1: url must be"):
        workers_from_flags(decode=["h:1"])
    with pytest.raises(ConfigError, match="another worker"):
        workers_from_flags(prefill=["http://h:1?name=a"], decode=["http://h:2?name=a"])
    with pytest.raises(ConfigError, match=r"--engine .* at that address"):
        workers_from_flags(prefill=["http://h:1"], engine=["http://h:1/?name=b"])
