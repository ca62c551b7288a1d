"""What is wrong with a host by itself: its software, folders, memory, GPUs, clock and proxies."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from tfdist_cli.doctor.examine import Seen
from tfdist_cli.doctor.finding import Finding
from tfdist_cli.spec.sections.cluster import Cluster

GIB = 2**30
OLDEST = {"Python": (3, 10), "TensorFlow": (2, 20), "Keras": (3, 12)}
"""What tfdist needs."""
CLOCK_SECONDS = 2.0
ROOM_WANTED = GIB
MEMORY_OF_A_TASK = GIB // 2
"""What a task takes for TensorFlow alone."""


def software_findings(one: Seen, *, needed: bool) -> Iterator[Finding]:
    """Whether its Python can train; said of hosts that are to."""
    name, versions, imported = one.site.name, one.facts["versions"], one.facts["imported"] or {}
    python = one.facts["executable"]
    if not needed:
        return
    if _numbers(one.facts["python"]) < OLDEST["Python"]:
        yield Finding(
            "old-python",
            "error",
            name,
            f"{python} is Python {one.facts['python']}, and tfdist needs {_dotted(OLDEST['Python'])} or later",
            "install a later Python there, with tfdist in an environment of its own",
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
                f"{package} is {versions[key]}, and tfdist needs {_dotted(OLDEST[package])} or later",
                f"{shlex.quote(python)} -m pip install --upgrade '{key}>={_dotted(OLDEST[package])}'",
            )


def _backend_finding(one: Seen) -> Finding | None:
    backend, where = one.facts["keras_backend"]
    if backend == "tensorflow":
        return None
    return Finding(
        "keras-backend",
        "error",
        one.site.name,
        f"{where} has Keras use {backend}, and tfdist trains with TensorFlow",
        "set KERAS_BACKEND=tensorflow" if where == "KERAS_BACKEND" else f'write "backend": "tensorflow" in {where}',
    )


def version_findings(awake: Sequence[Seen], *, trains: bool) -> Iterator[Finding]:
    """What hosts that work together must have alike; TensorFlow promises its protocol to one minor version."""
    workers = [one for one in awake if one.site.tasks]
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


def _version(one: Seen, key: str) -> str:
    return str(one.facts["python"] if key == "python" else one.facts["versions"][key])


def folder_findings(one: Seen) -> Iterator[Finding]:
    """Whether what is to be written can be."""
    for purpose, folder in one.site.folders.items():
        told = one.facts["folders"][folder]
        if told.get("full"):
            yield Finding(
                "no-disk",
                "error",
                one.site.name,
                f"{folder}, for {purpose}, is on a disk that is full",
                f"make room below {told['at']}, or choose another folder: {_key(purpose)}",
            )
        elif "error" in told:
            yield Finding(
                "no-write-access",
                "error",
                one.site.name,
                f"{folder}, for {purpose}, cannot be written to: {told['error']} in {told['at']}",
                f"let its user write to {told['at']}, or choose another folder: {_key(purpose)}",
            )
        elif told["free"] < ROOM_WANTED:
            yield Finding(
                "little-disk",
                "warning",
                one.site.name,
                f"{folder}, for {purpose}, has {told['free'] / 2**20:.0f} MiB left",
                f"make room below {told['at']}, or choose another folder: {_key(purpose)}",
            )


def _key(purpose: str) -> str:
    return "checkpoint.dir of the recipe" if purpose == "checkpoints" else "run_dir of the cluster file"


def memory_findings(one: Seen, cluster: Cluster | None) -> Iterator[Finding]:
    """Whether its tasks have room beside what runs there now."""
    available = one.facts["memory"]["available"]
    roles = [cluster.role(task) for task in one.site.tasks] if cluster else []
    wanted = sum(role.memory.bytes if role.memory else MEMORY_OF_A_TASK for role in roles)
    if available is not None and wanted > available:
        yield Finding(
            "little-memory",
            "warning",
            one.site.name,
            f"its {len(roles)} tasks need {wanted / GIB:.1f} GiB of memory or more; {available / GIB:.1f} GiB are free",
            "end other programs there, or give it fewer tasks",
        )


def gpu_findings(one: Seen, cluster: Cluster | None) -> Iterator[Finding]:
    """Whether the GPUs that are asked for are there, and TensorFlow sees those that are."""
    there, imported = one.facts["gpus"], one.facts["imported"] or {}
    if there and imported.get("gpus") == 0:
        built = "finds no driver for it" if imported["cuda"] else "is built for the CPU"
        yield Finding(
            "gpus-unused",
            "warning",
            one.site.name,
            f"it has {len(there)} GPUs, {there[0]['name']}, and its TensorFlow sees none: it {built}",
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
            f"its tasks are to have {most} GPUs, and it has {len(there) or 'none'}",
            "lower gpus of a role, or give tasks to other hosts",
        )


def clock_findings(one: Seen) -> Iterator[Finding]:
    """Whether it has this machine's time."""
    ahead, doubt = one.clock
    if abs(ahead) - doubt > CLOCK_SECONDS:
        yield Finding(
            "clock-off",
            "warning",
            one.site.name,
            f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this machine's: times in logs "
            "and of checkpoints will not fit together",
            "let it follow a time server: timedatectl set-ntp true",
        )


def proxy_findings(one: Seen, cluster: Cluster | None) -> Iterator[Finding]:
    """Whether a proxy stands between tasks that tfdist does not start; for its own it sees to that."""
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
        f"{name} is {proxy}: what goes between tasks goes there, unless tfdist starts them",
        f"export no_grpc_proxy={','.join(sorted(hosts))}",
    )


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.21.0rc1 → (2, 21)."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))
