"""Addresses: every form that users write, and one form that equal addresses share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist_cli.errors import InvalidValue
from tfdist_cli.spec.address import Address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("gpu01", "gpu01", 2222),
        ("gpu01:2223", "gpu01", 2223),
        (" gpu01:1 ", "gpu01", 1),
        ("gpu01.rack-3.example.org.:65535", "gpu01.rack-3.example.org.", 65535),
        ("tfdist-worker_1:80", "tfdist-worker_1", 80),
        ("10.85.125.105", "10.85.125.105", 2222),
        ("[::1]:2222", "::1", 2222),
        ("[fe80::1%eth0]", "fe80::1%eth0", 2222),
    ],
)
def test_reads(text, host, port):
    assert Address.parse(text) == Address(host, port)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "invalid-host"),
        (":2222", "invalid-host"),
        ("a:", "invalid-port"),
        ("a:0", "invalid-port"),
        ("a:65536", "invalid-port"),
        ("a:-1", "invalid-port"),
        ("a:²", "invalid-port"),
        ("a:ssh", "invalid-port"),
        ("::1", "invalid-address"),
        ("[::1", "invalid-address"),
        ("[::1]2222", "invalid-address"),
        ("[gpu01]:2222", "invalid-address"),
        ("1.2.3", "invalid-host"),
        ("1.2.3.256", "invalid-host"),
        ("0.0.0.0:2222", "unspecified-address"),
        ("[::]:2222", "unspecified-address"),
        ("-rf:22", "invalid-host"),
        ("a b:22", "invalid-host"),
        ("a;reboot:22", "invalid-host"),
        ("a..b", "invalid-host"),
        ("a" * 64, "invalid-host"),
        (".".join(["a" * 60] * 5), "invalid-host"),
    ],
)
def test_refuses(text, code):
    with pytest.raises(InvalidValue) as caught:
        Address.parse(text)
    assert caught.value.code == code


def test_equal_hosts_are_equal_addresses():
    assert Address.parse("GPU01:2222") == Address.parse("gpu01")
    assert Address.parse("[0:0:0:0:0:0:0:1]:1") == Address.parse("[::1]:1")


def test_knows_this_machine():
    assert all(Address(host).is_loopback for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost"))
    assert not any(Address(host).is_loopback for host in ("gpu01", "10.0.0.1", "fe80::1"))


@given(
    st.one_of(st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z]", fullmatch=True), st.ip_addresses().map(str)),
    st.integers(1, 65535),
)
def test_what_it_writes_it_reads(host, port):
    try:
        address = Address.parse(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except InvalidValue as error:
        assert error.code == "unspecified-address"  # noqa: PT017
    else:
        assert Address.parse(str(address)) == address


@given(st.text())
def test_any_text_is_an_address_or_a_value_error(text):
    try:
        Address.parse(text)
    except InvalidValue as error:
        assert error.code  # noqa: PT017
