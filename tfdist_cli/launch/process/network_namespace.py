"""Makes a network namespace that has only its own loopback interface, and brings commands into it.

Run as a script, by an isolated interpreter that starts in milliseconds:

* `namespace.py make PORT…` makes one, as root or, elsewhere, in a user namespace in which this user is itself. It holds
  the ports in it as `ports` does, writes a line, `ok USER` (1 if there is a user namespace) or why it is not possible,
  and stays until its standard input ends.
* `namespace.py enter USER NET COMMAND…` becomes the command, in the namespaces of these open files, USER being -1 for
  none.
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
    """Leaves this machine's network for one of this process's own."""
    try:
        own_user = _leave()
        _raise_loopback()
        held = [hold(port) for port in ports]
    except OSError as error:
        _answer(error.strerror or str(error))
        return
    _answer(f"ok {int(own_user)}")
    sys.stdin.read()
    del held


def enter(user: int, net: int, command: list[str]) -> None:
    """Becomes a command in the namespaces.

    Raises:
        OSError: they cannot be entered.
    """
    for file, kind in ((user, CLONE_NEWUSER), (net, CLONE_NEWNET)):
        if file >= 0:
            _call(_LIBC.setns, file, kind)
            os.close(file)
    try:
        os.execvp(command[0], command)  # noqa: S606 the task's own program, as an argv
    except OSError as error:
        sys.stderr.write(f"tfdist: {command[0]} cannot be started: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def _leave() -> bool:
    """Makes the namespace; whether it took one of users, in which this user may do so."""
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
    """A socket that keeps a port from everybody but a server; see `ports`."""
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
