"""A task's network address, written `host`, `host:port` or `[v6]:port`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from tfdist_cli.errors import InvalidValue

DEFAULT_PORT = 2222
LOOPBACK = "127.0.0.1"
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


@dataclass(frozen=True, order=True)
class Address:
    """Where a task's TensorFlow server listens.

    Args:
        host: a host name or an IP address, IPv6 without brackets.
        port: 1 to 65535, or 0 for "a free port, chosen at the start".
    """

    host: str
    port: int = DEFAULT_PORT

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads `host`, `host:port` or `[v6]:port`. The default port is 2222.

        Raises:
            InvalidValue: the host name is invalid, or the port is out of range.
        """
        text = text.strip()
        if text.startswith("["):
            host, bracket, rest = text[1:].partition("]")
            if not bracket or ":" not in host or (rest and not rest.startswith(":")):
                raise InvalidValue(f"{text!r} is not an address: expected '[v6]:port'", code="invalid-address")
            port = rest[1:] if rest else str(DEFAULT_PORT)
        elif text.count(":") > 1:
            raise InvalidValue(
                f"{text!r} is not an address: write an IPv6 address as '[{text}]:port'", code="invalid-address"
            )
        else:
            host, colon, port = text.partition(":")
            port = port if colon else str(DEFAULT_PORT)
        return cls(checked_host(host), _parse_port(port, text))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_public(self) -> bool:
        """Whether it is an IP address that the Internet routes to. Host names are not resolved."""
        try:
            return ipaddress.ip_address(self.host).is_global
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _parse_port(port: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", port):
        raise InvalidValue(f"{text!r} has port {port!r}: a port is a number from 1 to 65535", code="invalid-port")
    number = int(port)
    if not 1 <= number <= 65535:
        raise InvalidValue(f"{text!r} has port {number}: a port is a number from 1 to 65535", code="invalid-port")
    return number


def checked_host(host: str) -> str:
    """Returns the host in its normal form: names in lower case, IPv6 addresses shortened.

    Raises:
        InvalidValue: it is not a host name or an IP address.
    """
    if not host:
        raise InvalidValue("the host name is empty", code="invalid-host")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return _checked_name(host)
    if ip.is_unspecified:
        message = f"{host} stands for all addresses of a machine: write the one that the other tasks can reach"
        raise InvalidValue(message, code="unspecified-address")
    return str(ip)


def _checked_name(host: str) -> str:
    labels = host.removesuffix(".").split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        message = f"{host!r} is not a host name: use letters, digits, '-' and '.', with 1 to 63 characters between dots"
        raise InvalidValue(message, code="invalid-host")
    if all(label.isdigit() for label in labels):
        raise InvalidValue(f"{host!r} is not an IPv4 address", code="invalid-host")
    return host.lower()
