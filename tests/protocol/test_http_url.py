"""Where a worker may say that it serves HTTP."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError, InvalidArgumentError, RefusedError
from kvxfer.protocol.http_url import URL_CHARS_MAX, HostList, HttpUrl, check_registered_host, no_engine_at

NOTHING = HostList("allow_http_host", ())


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000),
        ("https://[2001:DB8::7]:65535/", "2001:db8::7", 65535),
        ("http://[::ffff:10.0.0.1]:1", "10.0.0.1", 1),
        ("http://Decode-0.svc.cluster.local", "decode-0.svc.cluster.local", 80),
        ("https://worker_1", "worker_1", 443),
    ],
)
def test_http_url_origin_is_read(text: str, host: str, port: int) -> None:
    url = HttpUrl.parse("http_url", text)
    assert (url.host, url.port) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "file:///etc/passwd",
        "ftp://10.0.0.1:21",
        "HTTP://10.0.0.1:1",
        "http:10.0.0.1",
        "http://",
        "http://user@10.0.0.1:1",
        "http://user:secret@10.0.0.1:1",
        "http://10.0.0.1:1/latest/meta-data",
        "http://10.0.0.1:1?x=1",
        "http://10.0.0.1:1/?x=1",
        "http://10.0.0.1:1#x",
        "http://10.0.0.1:1\\@b",
        "http://10.0.0.1:0",
        "http://10.0.0.1:65536",
        "http://10.0.0.1:-1",
        "http://10.0.0.1:",
        "http://10.0.0.1:8\n",
        " http://10.0.0.1:8",
        "http://10.0.0.1:٨",
        "http://0.0.0.0:8000",
        "http://[::]:8000",
        "http://224.0.0.1:8000",
        "http://239.255.255.255:8000",
        "http://255.255.255.255:8000",
        "http://0.1.2.3:8000",
        "http://[ff02::1]:8000",
        "http://[::ffff:0.0.0.0]:8000",
        "http://[::ffff:255.255.255.255]:8000",
        "http://[64:ff9b::224.0.0.1]:8000",
        "http://169.254.169.254",
        "http://[::ffff:169.254.169.254]",
        "http://[::ffff:a9fe:a9fe]",
        "http://[::169.254.169.254]",
        "http://[64:ff9b::a9fe:a9fe]",
        "http://[2002:a9fe:a9fe::1]",
        "http://[fd00:ec2::254]",
        "http://100.100.100.200",
        "http://2852039166",
        "http://0xa9fea9fe",
        "http://0xA9.0xFE.0xA9.0xFE",
        "http://0251.0376.0251.0376",
        "http://0251.254.169.254",
        "http://169.254.43518",
        "http://169.254.169.254.",
        "http://169.254.0xa9fe",
        "http://127.1:8000",
        "http://2130706433:8000",
        "http://0x7f000001:8000",
        "http://10.0.0.1.:8000",
        "http://[10.0.0.1]x:8000",
        "http://[:::]:8000",
        "http://[fe80::1%eth0]:8000",
        "http://-a:1",
        "http://a..b:1",
        "http://ä.example:1",
        "http://" + "h" * 300 + ":1",
        "http://" + "/" * URL_CHARS_MAX,
    ],
)
def test_http_url_that_is_no_origin_is_refused_by_the_fields_name(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^info\.http_url must"):
        HttpUrl.parse("info.http_url", text)


LINK_LOCAL = ["169.254.0.1", "169.254.255.255", "fe80::1", "febf::1", "::ffff:169.254.1.1", "64:ff9b::a9fe:101"]


@pytest.mark.parametrize("host", LINK_LOCAL)
def test_http_url_that_is_link_local_is_no_address_for_all(host: str) -> None:
    url = HttpUrl.parse("url", f"http://[{host}]:1" if ":" in host else f"http://{host}:1")
    with pytest.raises(InvalidArgumentError, match=r"^url must .* link-local"):
        url.check_routed("url")


@pytest.mark.parametrize("host", ["10.0.0.1", "127.0.0.1", "[::1]", "[fd00::1]", "[2001:db8::1]", "169.example", "w"])
def test_http_url_that_is_not_link_local_is_one(host: str) -> None:
    """A name is judged by what it stands for when it is dialled."""
    HttpUrl.parse("url", f"http://{host}:1").check_routed("url")


@given(st.ip_addresses(v=4))
def test_ipv4_address_within_an_ipv6_one_is_judged_as_itself(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    nat64, sixtofour = (0x64FF9B << 96) | number, (0x2002 << 112) | (number << 80)
    for within in (0xFFFF00000000 | number, nat64, sixtofour):
        assert no_engine_at(ipaddress.IPv6Address(within)) == no_engine_at(address)


@given(st.text())
def test_http_url_reading_is_total(text: str) -> None:
    for value in (text, "http://" + text):
        try:
            url = HttpUrl.parse("http_url", value)
        except InvalidArgumentError:
            continue
        shown = f"[{url.host}]" if ":" in url.host else url.host
        assert HttpUrl.parse("http_url", f"{url.scheme}://{shown}:{url.port}") == url


@pytest.mark.parametrize("entry", ["", "http://a", "a/b", "10.0.0.0/99", "10.0.0.1/8", "*", "*.", "*.1", "a b", "é"])
def test_host_list_entry_that_is_no_host_is_a_config_error(entry: str) -> None:
    with pytest.raises(ConfigError, match="allow_http_host"):
        HostList("allow_http_host", [entry])


def test_host_list_allows_addresses_networks_names_and_what_is_below_a_name() -> None:
    hosts = HostList("x", ["10.0.0.1", "192.168.0.0/16", "[2001:db8::7]", "Decode", "*.svc.local"])
    for host in ("10.0.0.1", "192.168.7.7", "2001:db8::7", "decode", "a.svc.local", "b.a.svc.local"):
        assert hosts.allows(host), host
    for host in ("10.0.0.2", "2001:db8::8", "decode.evil", "svc.local", "xsvc.local", "evil"):
        assert not hosts.allows(host), host


def check(host: str, peer: str, allowed: HostList = NOTHING, own: str = "10.9.9.9") -> None:
    check_registered_host("f", host, peer=peer, allowed=allowed, is_own=lambda address: address == own, option="--o")


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("10.0.0.1", "::ffff:10.0.0.1"),
        ("2001:db8::7", "2001:db8:0::7"),
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("127.0.0.2", "::1"),
        ("127.0.0.1", ""),
        ("10.9.9.9", "127.0.0.1"),
    ],
)
def test_registered_host_that_the_agent_comes_from_is_taken(host: str, peer: str) -> None:
    check(host, peer)


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("10.0.0.2", "10.0.0.1"),
        ("169.254.169.254", "127.0.0.1"),
        ("127.0.0.1", "10.0.0.1"),
        ("localhost", "10.9.9.9"),
        ("10.9.9.9", "10.0.0.1"),
        ("decode", "10.0.0.1"),
        ("decode", "127.0.0.1"),
        ("localhost", "garbage"),
    ],
)
def test_host_of_another_worker_is_refused_unless_allowed(host: str, peer: str) -> None:
    with pytest.raises(RefusedError, match=r"f names the host .*--o"):
        check(host, peer)
    check(host, peer, HostList("x", [host]))
