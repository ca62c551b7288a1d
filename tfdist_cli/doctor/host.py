"""Findings about a single host: software, folders, memory, GPUs, clock and proxies."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from tfdist_cli.doctor.examine import HostResult
from tfdist_cli.finding import Finding
from tfdist_cli.spec.sections.cluster import Cluster

GIB = 2**30
OLDEST = {"Python": (3, 10), "TensorFlow": (2, 20), "Keras": (3, 12)}
"""Oldest supported versions."""
CLOCK_SECONDS = 2.0
ROOM_WANTED = GIB
MEMORY_OF_A_TASK = GIB // 2
"""Bytes of memory that TensorFlow takes in a task without a model."""


def software_findings(one: HostResult, *, needed: bool) -> Iterator[Finding]:
    """Yields problems of Python, TensorFlow, Keras and tfdist on a host that trains."""
    name, versions, imported = one.site.name, one.facts["versions"], one.facts["imported"] or {}
    python = one.facts["executable"]
    if not needed:
        return
    if _numbers(one.facts["python"]) < OLDEST["Python"]:
        yield Finding(
            "old-python",
            "error",
            name,
            f"{python} is Python {one.facts['python']}, but tfdist requires {_dotted(OLDEST['Python'])} or later",
            "install a newer Python there, and tfdist in a virtual environment",
        )
    elif not versions["tensorflow"]:
        yield Finding(
            "no-tensorflow",
            "error",
            name,
            f"{python} has no TensorFlow",
            f"{shlex.quote(python)} -m pip install 'tfdist-cli[cpu]', or 'tfdist-cli[cuda]' for NVIDIA GPUs",
        )
    elif wrong := _backend_finding(one):
        yield wrong
    elif "error" in imported:
        yield Finding(
            "broken-tensorflow",
            "error",
            name,
            f"{python} cannot import TensorFlow: {imported['error']}",
            f"{shlex.quote(python)} -m pip install --force-reinstall 'tfdist-cli[cpu]', or 'tfdist-cli[cuda]'",
        )
    elif not versions["tfdist"] and one.site.remote:
        yield Finding(
            "no-tfdist", "error", name, f"{python} has no tfdist", f"{shlex.quote(python)} -m pip install tfdist-cli"
        )
    for package, key in (("TensorFlow", "tensorflow"), ("Keras", "keras")):
        if versions[key] not in ("", "?") and _numbers(versions[key]) < OLDEST[package]:
            yield Finding(
                "old-version",
                "error",
                name,
                f"{package} is {versions[key]}, but tfdist requires {_dotted(OLDEST[package])} or later",
                f"{shlex.quote(python)} -m pip install --upgrade '{key}>={_dotted(OLDEST[package])}'",
            )


def _backend_finding(one: HostResult) -> Finding | None:
    backend, where = one.facts["keras_backend"]
    if backend == "tensorflow":
        return None
    return Finding(
        "keras-backend",
        "error",
        one.site.name,
        f"{where} selects the Keras backend {backend}, but tfdist trains with TensorFlow",
        "set KERAS_BACKEND=tensorflow" if where == "KERAS_BACKEND" else f'write "backend": "tensorflow" in {where}',
    )


def version_findings(answering: Sequence[HostResult], *, trains: bool) -> Iterator[Finding]:
    """Yields differences of versions between hosts. TensorFlow's protocol is stable within a minor version only."""
    workers = [one for one in answering if one.site.tasks]
    for package, key in (("tfdist", "tfdist"), ("TensorFlow", "tensorflow"), ("Keras", "keras"), ("Python", "python")):
        if not trains and key != "python":
            continue
        having = {one.site.name: version for one in workers if (version := _version(one, key)) not in ("", "?")}
        first = next(iter(having), "")
        for name, version in having.items():
            length = 3 if key == "tfdist" else 2
            if _numbers(version)[:length] != _numbers(having[first])[:length]:
                wanted = f"{key}=={having[first]}" if key != "tfdist" else f"tfdist-cli=={having[first]}"
                yield Finding(
                    "wrong-version",
                    "warning" if key in ("keras", "python") else "error",
                    name,
                    f"{package} is {version}, and {having[first]} on {first}",
                    f"give both the same: pip install '{wanted}'"
                    if key != "python"
                    else f"use the same Python on both, such as {having[first]}",
                )


def _version(one: HostResult, key: str) -> str:
    return str(one.facts["python"] if key == "python" else one.facts["versions"][key])


def folder_findings(one: HostResult) -> Iterator[Finding]:
    """Yields problems of the folders that the job writes to."""
    for purpose, folder in one.site.folders.items():
        result = one.facts["folders"][folder]
        if result.get("full"):
            yield Finding(
                "no-disk",
                "error",
                one.site.name,
                f"{folder}, for {purpose}, is on a full disk",
                f"free disk space below {result['at']}, or choose another folder: {_key(purpose)}",
            )
        elif "error" in result:
            yield Finding(
                "no-write-access",
                "error",
                one.site.name,
                f"{folder}, for {purpose}, is not writable: {result['error']} in {result['at']}",
                f"allow the user to write to {result['at']}, or choose another folder: {_key(purpose)}",
            )
        elif result["free"] < ROOM_WANTED:
            yield Finding(
                "little-disk",
                "warning",
                one.site.name,
                f"{folder}, for {purpose}, has {result['free'] / 2**20:.0f} MiB of free space",
                f"free disk space below {result['at']}, or choose another folder: {_key(purpose)}",
            )


def _key(purpose: str) -> str:
    return "checkpoint.dir of the recipe" if purpose == "checkpoints" else "run_dir of the cluster file"


def memory_findings(one: HostResult, cluster: Cluster | None) -> Iterator[Finding]:
    """Yields a warning if the free memory is too small for its tasks."""
    available = one.facts["memory"]["available"]
    roles = [cluster.role(task) for task in one.site.tasks] if cluster else []
    wanted = sum(role.memory.bytes if role.memory else MEMORY_OF_A_TASK for role in roles)
    if available is not None and wanted > available:
        yield Finding(
            "little-memory",
            "warning",
            one.site.name,
            f"its {len(roles)} tasks need {wanted / GIB:.1f} GiB of memory or more; {available / GIB:.1f} GiB are free",
            "stop other programs there, or assign fewer tasks to it",
        )


def gpu_findings(one: HostResult, cluster: Cluster | None) -> Iterator[Finding]:
    """Yields problems of GPUs: too few, or not visible to TensorFlow."""
    there, imported = one.facts["gpus"], one.facts["imported"] or {}
    if there and imported.get("gpus") == 0:
        built = "finds no driver for it" if imported["cuda"] else "is built for the CPU"
        yield Finding(
            "gpus-unused",
            "warning",
            one.site.name,
            f"it has {len(there)} GPUs, {there[0]['name']}, but TensorFlow sees none: it {built}",
            f"{shlex.quote(one.facts['executable'])} -m pip install 'tfdist-cli[cuda]', without tensorflow-cpu",
        )
    wanted = [cluster.role(task).gpus for task in one.site.tasks] if cluster else []
    ids = [int(gpu) for listed in wanted if isinstance(listed, list) for gpu in listed if isinstance(gpu, int)]
    most = max(sum(number for number in wanted if isinstance(number, int)), *(number + 1 for number in ids), 0, 0)
    if most > len(there):
        yield Finding(
            "too-few-gpus",
            "error",
            one.site.name,
            f"its tasks require {most} GPUs, but it has {len(there) or 'none'}",
            "lower gpus of a role, or assign tasks to other hosts",
        )


def clock_findings(one: HostResult) -> Iterator[Finding]:
    """Yields a warning if its clock differs from this machine's."""
    ahead, doubt = one.clock
    if abs(ahead) - doubt > CLOCK_SECONDS:
        yield Finding(
            "clock-off",
            "warning",
            one.site.name,
            f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this machine's: times in logs "
            "and of checkpoints will not match",
            "synchronize it with a time server: timedatectl set-ntp true",
        )


def proxy_findings(one: HostResult, cluster: Cluster | None) -> Iterator[Finding]:
    """Yields a warning if a proxy would carry gRPC between tasks that tfdist does not start.

    For tasks that it starts, tfdist excludes the addresses of the cluster from proxies.
    """
    proxies: Mapping[str, str] = one.facts["proxies"]
    if not proxies or (cluster and not one.site.tasks):
        return
    name, proxy = next(iter(proxies.items()))
    hosts = set(one.facts["names"]) or {"localhost", "127.0.0.1"}
    exempt = {part.strip() for part in one.facts["no_proxy"].split(",")}
    if exempt >= hosts or "*" in exempt:
        return
    yield Finding(
        "proxy",
        "warning",
        one.site.name,
        f"{name} is {proxy}: tasks that tfdist does not start connect to each other through it",
        f"export no_grpc_proxy={','.join(sorted(hosts))}",
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: 2.21.0rc1 → (2, 21)."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))
