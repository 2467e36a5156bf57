"""The YAML file of workers: what it may say, and where it is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError
from kvxfer.router.fleet.sources.file import FileSource
from kvxfer.router.fleet.sources.worker_file import FILE_BYTES_MAX, read_worker_file
from tests.support.fleet import fleet
from tests.support.upstream import until

WHOLE = b"""
# our fleet
defaults:
  dialect: sglang
  model: org/model
  bootstrap_port: 9000
workers:
  - url: http://10.0.0.1:8000
    role: prefill
  - {url: "http://10.0.0.2:8000", role: decode, name: d0, dp_rank: 1, bootstrap_port: 9001}
  - url: http://10.0.0.3:8000
    dialect: plain
    model: other
"""


def test_file_names_workers_and_defaults() -> None:
    workers = read_worker_file("w.yaml", WHOLE)
    assert [(w.agent_id, w.member.info.role.value, w.dialect, w.bootstrap_port, w.dp_rank) for w in workers] == [
        ("10.0.0.1-8000", "prefill", "sglang", 9000, None),
        ("d0", "decode", "sglang", 9001, 1),
        ("10.0.0.3-8000", "both", "plain", None, None),
    ]
    assert [w.member.info.model for w in workers] == ["org/model", "org/model", "other"]
    assert {w.source for w in workers} == {"file"}
    assert read_worker_file("w.yaml", b"workers: []") == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "w.yaml: empty"),
        ("- a", "w.yaml:1: the file must be a mapping"),
        ("defaults: {}", "w.yaml:1: there is no key workers"),
        ("workers: []\nwokers: []", "w.yaml:2: the file has the unknown key 'wokers'; it may have defaults, workers"),
        ("workers: []\nworkers: []", "w.yaml:2: the file has the key workers twice"),
        ("workers: {}", "w.yaml:1: workers must be a list"),
        ("workers:\n  - http://h:1", "w.yaml:2: a worker must be a mapping"),
        ("workers:\n  - role: decode", "w.yaml:2: a worker needs a url"),
        ("workers:\n  - url: http://h:1", "w.yaml:2: role must be one of prefill, decode, both, not None"),
        ("workers:\n  - url: http://h:1\n    role: decoder", "w.yaml:2: role must be one of"),
        ("workers:\n  - url: http://h:1\n    rolle: decode", "w.yaml:3: a worker has the unknown key 'rolle'"),
        (
            "workers:\n  - url: http://h:1\n    role: decode\n    role: decode",
            "w.yaml:4: a worker has the key role twice",
        ),
        (
            "workers:\n  - url: http://h:1\n    role: decode\n    dp_rank: one",
            "w.yaml:4: dp_rank must be a whole number",
        ),
        (
            "workers:\n  - url: http://h:1\n    role: decode\n    dp_rank: yes",
            "w.yaml:4: dp_rank must be a whole number",
        ),
        ("workers:\n  - url: http://h:1\n    role: decode\n    name: 7", "w.yaml:4: name must be text"),
        ("workers:\n  - url: http://h:1\n    role: decode\n    name: [a]", "w.yaml:4: name must be text"),
        ("workers:\n  - url: h\n    role: decode", "w.yaml:2: url must be http:// or https://"),
        *(
            (f"workers:\n- url: http://w:1\n  role: both\n- url: http://{host}\n  role: both", f"w.yaml:4: {says}")
            for host, says in (
                ("169.254.169.254", "url must have an address that an engine can have"),
                ("[::ffff:a9fe:a9fe]", "url must have an address that an engine can have"),
                ("169.254.1.1", "url must have an address that is the same on every link, not 169.254.1.1"),
                ("[fe80::1]", "url must have an address that is the same on every link, not fe80::1"),
                ("0.0.0.0", "url must have an address that an engine can have, not 0.0.0.0: it is unspecified"),
                ("[ff02::1]", "url must have an address that an engine can have, not ff02::1: it is multicast"),
                ("255.255.255.255", "url must have an address that an engine can have, not 255.255.255.255"),
                ("2852039166", "url must have an IP address or a host name"),
                ("0xa9.254.169.254", "url must have an IP address or a host name"),
                ("0251.0376.0251.0376", "url must have an IP address or a host name"),
            )
        ),
        ("defaults: {role: decode}\nworkers: []", "w.yaml:1: defaults has the unknown key 'role'"),
        (
            "workers:\n  - url: http://h:1\n    role: decode\n  - url: http://h:1\n    name: x\n    role: prefill",
            "w.yaml:4: the worker of line 2 has the same address",
        ),
        (
            "workers:\n  - {url: http://h:1, role: decode, name: x}\n  - {url: http://h:2, role: decode, name: x}",
            "w.yaml:3: the worker of line 2 has the same name",
        ),
        ("workers: [", "w.yaml:1: "),
        ("workers:\n\t- a", "w.yaml:2: found character"),
        ("a: 1\n---\nb: 2", "w.yaml:2: but found another document"),
        ("workers:\n  - {url: !!python/object/apply:os.getcwd [], role: decode}", "w.yaml:2: url must be text"),
        ("workers:\n  - {url: !!python/name:os.getcwd x, role: decode}", "w.yaml:2: could not determine a constructor"),
        (
            "workers:\n  - &a {url: http://h:1, role: decode}\n  - {<<: *a, name: x}",
            "w.yaml:3: a worker has the unknown key '<<'",
        ),
        ("workers:\n  - {? [a] : b}", "w.yaml:2: a worker has the unknown key"),
    ],
)
def test_file_that_is_wrong_is_refused_by_its_line(content: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_worker_file("w.yaml", content.encode())
    assert str(caught.value).startswith(says)


def test_file_beyond_its_bounds_is_refused() -> None:
    with pytest.raises(ConfigError, match="bytes"):
        read_worker_file("w.yaml", b"#" * (FILE_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match="no YAML"):
        read_worker_file("w.yaml", b"workers: " + b"[" * 20_000)


@given(
    st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)), st.integers(0, 400), st.integers(0, 400)
)
def test_file_of_any_bytes_is_workers_or_one_error(noise: bytes, at: int, end: int) -> None:
    for content in (noise, WHOLE[:at] + noise + WHOLE[end:]):
        with contextlib.suppress(ConfigError):
            read_worker_file("w.yaml", content)


def test_file_source_follows_the_file_and_keeps_the_last_list(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "workers.yaml"
    workers, _ = fleet()
    source = FileSource(str(path), workers)
    with pytest.raises(ConfigError, match=r"workers\.yaml: No such file"):
        source.load()

    def listed() -> list[str]:
        return [member.ref.agent_id for member in workers.members()]

    def write(text: str) -> None:
        other = tmp_path / "new"
        other.write_text(text)
        os.replace(other, path)
        asyncio.run(source.poll())

    path.write_text("workers: [{url: 'http://h:1', role: decode, name: a}]")
    source.load()
    assert listed() == ["a"]
    before = workers.members()
    write("workers: [{url: 'http://h:1', role: decode, name: a}, {url: 'http://h:2', role: prefill, name: b}]")
    assert listed() == ["a", "b"]
    assert before[0] == workers.members()[0]
    with caplog.at_level(logging.WARNING, "kvxfer.router"):
        write("workers:\n  - {url: 'http://h:1', rolle: decode}")
        for _ in range(5):
            asyncio.run(source.poll())
    assert [f"{path}:2: a worker has the unknown key 'rolle'" in record.getMessage() for record in caplog.records] == [
        True
    ]
    assert (listed(), ":2:" in source.last_error) == (["a", "b"], True)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "kvxfer.router"):
        path.unlink()
        for _ in range(5):
            asyncio.run(source.poll())
    assert len(caplog.records) == 1
    assert listed() == ["a", "b"]
    write("workers: []")
    assert (listed(), source.last_error) == ([], "")


async def test_file_source_polls_within_its_block_and_refuses_a_bad_start(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "workers.yaml"
    workers, _ = fleet()
    path.write_text("workers: {}")
    with pytest.raises(ConfigError, match="must be a list"):
        async with FileSource(str(path), workers):
            pass
    path.write_text("workers: []")
    async with FileSource(str(path), workers, poll_s=0.01):
        path.write_text("workers: [{url: 'http://h:1', role: decode, name: a}]")
        await until(lambda: [member.ref.agent_id for member in workers.members()] == ["a"])
