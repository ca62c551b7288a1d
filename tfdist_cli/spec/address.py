"""A task's network address, written `host`, `host:port` or `[v6]:port`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

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
        """Reads `host`, `host:port` or `[v6]:port`; the port is 2222 when none is named.

        Raises:
            ValueError: the host name cannot be one, or the port is out of range.
        """
        text = text.strip()
        if text.startswith("["):
            host, bracket, rest = text[1:].partition("]")
            if not bracket or ":" not in host or (rest and not rest.startswith(":")):
                raise ValueError(f"{text!r} is not an address: expected '[v6]:port'")
            port = rest[1:] if rest else str(DEFAULT_PORT)
        elif text.count(":") > 1:
            raise ValueError(f"{text!r} is not an address: write an IPv6 address as '[{text}]:port'")
        else:
            host, colon, port = text.partition(":")
            port = port if colon else str(DEFAULT_PORT)
        return cls(checked_host(host), _parse_port(port, text))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_public(self) -> bool:
        """Whether it is an IP address that is routed in the Internet; what a name stands for is not looked up."""
        try:
            return ipaddress.ip_address(self.host).is_global
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _parse_port(port: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", port):
        raise ValueError(f"{text!r} has port {port!r}: a port is a number from 1 to 65535")
    number = int(port)
    if not 1 <= number <= 65535:
        raise ValueError(f"{text!r} has port {number}: a port is a number from 1 to 65535")
    return number


def checked_host(host: str) -> str:
    """The host in the one form that equal hosts share: names in lower case, IPv6 addresses shortened.

    Raises:
        ValueError: it cannot be one.
    """
    if not host:
        raise ValueError("the host name is empty")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return _checked_name(host)
    if ip.is_unspecified:
        raise ValueError(f"{host} means every address of a machine: name the one that the other tasks reach")
    return str(ip)


def _checked_name(host: str) -> str:
    labels = host.removesuffix(".").split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{host!r} cannot be a host name: letters, digits, '-' and '.' only, labels of 1 to 63")
    if all(label.isdigit() for label in labels):
        raise ValueError(f"{host!r} is not an IPv4 address")
    return host.lower()
