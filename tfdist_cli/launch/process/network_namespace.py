"""Creates a network namespace with only a loopback interface, and runs commands in it.

Run as a script, by an isolated interpreter that starts in milliseconds:

* `network_namespace.py make PORT…` creates one: as root directly, as another user in a user namespace that maps this
  user to itself. It reserves the ports in it as `ports` does. It writes a line, `ok USER` (1 if there is a user
  namespace) or the reason of the failure, and runs until its standard input ends. Each line of that has further ports
  to reserve, and is answered with a line.
* `network_namespace.py enter USER NET COMMAND…` executes the command in the namespaces of these open files; USER is -1
  if there is no user namespace.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def make(ports: list[int]) -> None:
    """Moves this process into a new network namespace."""
    try:
        own_user = _unshare()
        _raise_loopback()
        held = [hold(port) for port in ports]
    except OSError as error:
        _answer(error.strerror or str(error))
        return
    _answer(f"ok {int(own_user)}")
    for line in sys.stdin:
        for port in line.split():
            try:
                held.append(hold(int(port)))
            except OSError:
                continue
        _answer("ok")


def enter(user: int, net: int, command: list[str]) -> None:
    """Executes a command in the namespaces.

    Raises:
        OSError: they cannot be entered.
    """
    for file, kind in ((user, CLONE_NEWUSER), (net, CLONE_NEWNET)):
        if file >= 0:
            _call(_LIBC.setns, file, kind)
            os.close(file)
    try:
        os.execvp(command[0], command)  # noqa: S606 the task's own program, as an argument list
    except OSError as error:
        sys.stderr.write(f"tfdist: {command[0]} cannot be started: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def _unshare() -> bool:
    """Creates the namespace; returns whether that required a user namespace."""
    try:
        _call(_LIBC.unshare, CLONE_NEWNET)
    except PermissionError:
        user, group = os.getuid(), os.getgid()
        _call(_LIBC.unshare, CLONE_NEWUSER | CLONE_NEWNET)
        _write("setgroups", "deny")
        _write("uid_map", f"{user} {user} 1")
        _write("gid_map", f"{group} {group} 1")
        return True
    return False


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))


def hold(port: int) -> socket.socket:
    """A socket that reserves a port for a server; see `ports`."""
    both = socket.has_dualstack_ipv6()
    held = socket.socket(socket.AF_INET6 if both else socket.AF_INET, socket.SOCK_STREAM)
    if both:
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    held.bind(("::" if both else "", port))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held


def _call(function: "ctypes._NamedFuncPointer", *arguments: int) -> None:
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _answer(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _write(name: str, text: str) -> None:
    with open(f"/proc/self/{name}", "wb") as file:  # noqa: PTH123 pathlib would double the time of the start
        file.write(text.encode())


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make([int(port) for port in sys.argv[2:]])
    else:
        enter(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
