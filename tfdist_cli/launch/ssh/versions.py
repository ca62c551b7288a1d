"""The versions that tasks depend on, read from what is installed without importing it, and compared between hosts."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from tfdist_cli.errors import UsageError

TENSORFLOW = ("tensorflow", "tensorflow-cpu", "tensorflow-macos", "tensorflow-rocm", "tf-nightly", "tf-nightly-cpu")
"""The names that TensorFlow goes by."""
_SHOWN = {"python": "Python", "tfdist": "tfdist", "tensorflow": "TensorFlow", "keras": "Keras"}


def installed() -> dict[str, str]:
    """The versions here; empty for what is not installed. Of Python only the first two numbers matter."""
    found = (_version(name) for name in TENSORFLOW)
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "tfdist": _version("tfdist-cli"),
        "tensorflow": next(filter(None, found), ""),
        "keras": _version("keras"),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def compare(hosts: Mapping[str, Mapping[str, str]], here: Mapping[str, str], *, trains: bool, same: bool) -> None:
    """Refuses hosts that cannot train together.

    Args:
        hosts: each host's versions.
        here: those of this machine, which need not have TensorFlow.
        trains: whether the tasks train a recipe; a program of the user's own needs what it needs.
        same: whether all must have the same.

    Raises:
        UsageError: naming the host and both versions.
    """
    for host, versions in hosts.items():
        if trains and not versions.get("tensorflow"):
            raise UsageError(
                f"TensorFlow is not installed on {host}, and training needs it",
                hint=f"install 'tfdist-cli[cpu]' or 'tfdist-cli[cuda]' on {host}, or name the Python that has it "
                "as 'python' of the host",
            )
    if not same:
        return
    first, wanted = next(iter(hosts.items()))
    for host, versions in hosts.items():
        _check("tfdist", host, versions, "here", here)
        for package in ("python", "tensorflow", "keras") if trains else ():
            _check(package, host, versions, f"on {first}", wanted)


def _check(package: str, host: str, there: Mapping[str, str], where: str, wanted: Mapping[str, str]) -> None:
    if there.get(package) != wanted.get(package):
        name = _SHOWN[package]
        raise UsageError(
            f"{host} has {name} {there.get(package) or 'not at all'}, and {where} it is {wanted.get(package) or 'not'}",
            hint=f"install the same {name} on all hosts, or allow it with 'ssh: {{versions: any}}'",
        )
