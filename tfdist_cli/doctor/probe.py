"""The probe: a program for Python 3.7 and later, standard library only, that collects facts of its host.

It is sent to a host and run by any Python there. It reads one JSON request per line from stdin and answers each with a
line on stdout. It exits at the end of its input and closes its ports.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CONNECT_TIMEOUT = 3.0
IMPORT_TIMEOUT = 120.0
WRITTEN = 2**20
"""Bytes of the temporary file that tests whether a folder is writable."""
PACKAGES = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-macos", "tensorflow-rocm", "tf-nightly"),
    "keras": ("keras", "keras-nightly"),
    "tfdist": ("tfdist-cli",),
}
"""Distributions that provide each package."""
SEEN_BY_TENSORFLOW = """
import json, keras, tensorflow as tf
gpus = tf.config.list_physical_devices("GPU")
print(json.dumps({"tensorflow": tf.__version__, "keras": keras.__version__, "gpus": len(gpus),
                  "cuda": tf.test.is_built_with_cuda()}))
"""
EXEMPT = ("no_grpc_proxy", "no_proxy", "NO_PROXY")
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")


def main(clock: Callable[[], float] = time.time) -> None:
    """Answers requests until the end of the input.

    Args:
        clock: returns the time in seconds since 1970.
    """
    answers: dict[str, Callable[[Any], Any]] = {
        "look": look,
        "clock": lambda _: {"now": clock()},
        "listen": lambda question: listen(question["ports"], question["token"]),
        "connect": lambda question: connect(question["to"]),
    }
    for line in sys.stdin.buffer:
        question = json.loads(line.decode("utf-8"))
        sys.stdout.write(json.dumps(answers[question["do"]](question)) + "\n")
        sys.stdout.flush()


def look(question: dict[str, Any]) -> dict[str, Any]:
    """Collects the facts of this host."""
    return {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": {name: installed(names) for name, names in PACKAGES.items()},
        "imported": imported() if question["imports"] else None,
        "keras_backend": keras_backend(os.environ),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": memory(),
        "gpus": gpus(),
        "addresses": addresses(),
        "address": address(),
        "names": {name: resolved(name) for name in question["names"]},
        "folders": {folder: written(folder) for folder in question["folders"]},
        "proxies": proxies(os.environ),
        "no_proxy": next(filter(None, map(os.environ.get, EXEMPT)), ""),
        "firewall": firewall(),
    }


def installed(names: tuple[str, ...]) -> str:
    """Returns the version of the first installed package; empty if none is, `?` if this Python cannot tell."""
    try:
        from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 not in Python 3.7
    except ImportError:
        return "?"
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def keras_backend(environ: Mapping[str, str]) -> tuple[str, str]:
    """Returns Keras's backend and the place that selects it, like `requirements.keras_backend`."""
    if environ.get("KERAS_BACKEND"):
        return environ["KERAS_BACKEND"], "KERAS_BACKEND"
    home = Path.home() if os.access(str(Path.home()), os.W_OK) else Path("/tmp")  # noqa: S108 Keras's own choice
    path = Path(environ["KERAS_HOME"]) if environ.get("KERAS_HOME") else home / ".keras"
    try:
        found = json.loads((path / "keras.json").read_text(encoding="utf-8"))
        return str(found.get("backend", "tensorflow")), str(path / "keras.json")
    except (OSError, ValueError, AttributeError):
        return "tensorflow", "KERAS_BACKEND"


def imported() -> dict[str, Any]:
    """Imports TensorFlow in another process, which may crash, and returns its versions and devices."""
    env = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3")
    try:
        done = subprocess.run(
            [sys.executable, "-c", SEEN_BY_TENSORFLOW],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=IMPORT_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"the import took longer than {IMPORT_TIMEOUT:g} s"}
    if done.returncode:
        stderr = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return {"error": stderr[-1] if stderr else f"Python exited with {done.returncode}"}
    result: dict[str, Any] = json.loads(done.stdout.decode("utf-8").splitlines()[-1])
    return result


def lines_of(path: str) -> list[str]:
    """Returns the lines of a system file; empty if it does not exist."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def memory() -> dict[str, Any]:
    """Returns total and available memory in bytes."""
    found = {}
    for line in lines_of("/proc/meminfo"):
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            found[name] = int(rest.split()[0]) * 1024
    return {"total": found.get("MemTotal"), "available": found.get("MemAvailable")}


def gpus() -> list[dict[str, str]]:
    """Returns the GPUs that the driver reports."""
    tool = shutil.which("nvidia-smi")
    if tool:
        wanted = "--query-gpu=name,memory.total,memory.used"
        done = subprocess.run([tool, wanted, "--format=csv,noheader,nounits"], capture_output=True, check=False)
        rows = [line.split(", ") for line in done.stdout.decode("utf-8", "replace").splitlines()]
        return [{"name": row[0], "mib": row[1], "used_mib": row[2]} for row in rows if len(row) == 3]
    names = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    return [{"name": name} for name in names]


def addresses() -> list[str]:
    """Returns the IP addresses of this host's interfaces."""
    found, last = set(), ""
    for line in lines_of("/proc/net/fib_trie"):
        if "|--" in line:
            last = line.split()[-1]
        elif "/32 host LOCAL" in line:
            found.add(last)
    for line in lines_of("/proc/net/if_inet6"):
        found.add(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])))
    return sorted(found)


def address() -> str:
    """Returns this host's IP address of the ssh connection; empty without ssh."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    return parts[2].partition("%")[0] if len(parts) == 4 else ""


def resolved(name: str) -> list[str]:
    """Returns the IP addresses of a host name; empty if it cannot be resolved."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def written(folder: str) -> dict[str, Any]:
    """Tests whether a folder, or its nearest existing parent, is writable, and returns the free space in bytes."""
    path = Path(os.path.expanduser(folder)).absolute()  # noqa: PTH111 Path.expanduser raises without a home folder
    while not path.exists() and path.parent != path:
        path = path.parent
    result: dict[str, Any] = {"at": str(path)}
    try:
        result["free"] = shutil.disk_usage(str(path)).free
        with tempfile.TemporaryFile(dir=str(path)) as file:
            file.write(b"\0" * WRITTEN)
            file.flush()
    except OSError as error:
        result["error"] = error.strerror or str(error)
        result["full"] = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return result


def proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the proxy variables, without credentials before an `@`."""
    return {name: text.rpartition("@")[2] for name, text in sorted(environ.items()) if text and name.lower() in PROXIES}


def firewall() -> str:
    """Returns the program that changes firewall rules here; empty if there is none."""
    if any(line.strip().lower() == "enabled=yes" for line in lines_of("/etc/ufw/ufw.conf")):
        return "ufw"
    if Path("/run/firewalld").exists():
        return "firewalld"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return next((tool for tool in ("nft", "iptables") if shutil.which(tool, path=path)), "")


def listen(ports: dict[str, int], token: str) -> dict[str, Any]:
    """Listens on ports on all interfaces, as TensorFlow servers do, and sends the token to each client.

    Args:
        ports: the port of each task; 0 for any.
        token: the reply.

    Returns:
        For each task its port, or the error.
    """
    return {task: _listen(port, token) for task, port in ports.items()}


def _listen(port: int, token: str) -> dict[str, Any]:
    family = socket.AF_INET6 if _has_ipv6() else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        server.bind(("", port))
        server.listen(64)
    except OSError as error:
        server.close()
        return {"port": port, "error": errno.errorcode.get(error.errno or 0, "?"), "by": user_of(port)}

    def greet() -> None:
        while True:
            client = server.accept()[0]
            try:
                client.sendall(token.encode("ascii"))
            except OSError:  # the client has closed the connection
                pass
            finally:
                client.close()

    threading.Thread(target=greet, daemon=True).start()
    return {"port": server.getsockname()[1]}


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            tried.bind(("", 0))
    except OSError:
        return False
    return True


def _target(descriptor: Path) -> str:
    """Returns what a descriptor of a process refers to; empty if the process has closed it meanwhile."""
    try:
        return os.readlink(str(descriptor))  # noqa: PTH115 Python 3.7 has none
    except FileNotFoundError:
        return ""


def user_of(port: int) -> str:
    """Returns the program that listens on a port; empty if this user cannot see it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in (line.split() for line in lines_of(table)[1:]):
            if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{row[9]}]")
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        try:
            if any(_target(handle) in inodes for handle in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text(encoding='utf-8').strip()} (pid {process.name})"
        except OSError:  # a process of another user, or one that has exited
            continue
    return ""


def connect(targets: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Connects to ports of hosts concurrently.

    Args:
        targets: host and port of each connection.

    Returns:
        For each the reply, or the error.
    """
    if not targets:
        return []
    with ThreadPoolExecutor(min(64, len(targets))) as pool:
        return list(pool.map(_connect, targets))


def _connect(target: tuple[str, int]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        with socket.create_connection((target[0], target[1]), CONNECT_TIMEOUT) as reached:
            heard = reached.makefile("rb").read(64).decode("ascii", "replace")
        return {"heard": heard, "seconds": time.monotonic() - began}
    except socket.gaierror as error:
        return {"error": "unknown", "said": error.strerror}
    except socket.timeout:  # noqa: UP041 another class before Python 3.10
        return {"error": "timeout"}
    except OSError as error:
        return {"error": errno.errorcode.get(error.errno or 0, "?"), "said": error.strerror}


if __name__ == "__main__":
    main()
