"""Reads the versions of installed packages without importing them, and compares them between hosts."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from tfdist_cli.errors import UsageError

TENSORFLOW = ("tensorflow", "tensorflow-cpu", "tensorflow-macos", "tensorflow-rocm", "tf-nightly", "tf-nightly-cpu")
"""The names of TensorFlow's packages."""
_SHOWN = {"python": "Python", "tfdist": "tfdist", "tensorflow": "TensorFlow", "keras": "Keras"}


def installed() -> dict[str, str]:
    """Returns the versions on this machine: of Python major and minor; empty for a package that is not installed."""
    versions = (_version(name) for name in TENSORFLOW)
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "tfdist": _version("tfdist-cli"),
        "tensorflow": next(filter(None, versions), ""),
        "keras": _version("keras"),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def compare(hosts: Mapping[str, Mapping[str, str]], here: Mapping[str, str], *, trains: bool, same: bool) -> None:
    """Checks that the hosts can train together.

    Args:
        hosts: each host's versions.
        here: this machine's versions; TensorFlow may be missing.
        trains: whether the tasks train a recipe. The needs of a user's program are unknown.
        same: whether all versions must be equal.

    Raises:
        UsageError: TensorFlow is missing on a host, or versions differ.
    """
    for host, versions in hosts.items():
        if trains and not versions.get("tensorflow"):
            raise UsageError(
                f"TensorFlow is not installed on {host}, and training needs it",
                code="no-tensorflow",
                hint=f"install 'tfdist-cli[cpu]' or 'tfdist-cli[cuda]' on {host}, or name the Python that has it "
                "with the key python of the host or of the section spark",
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
            f"{name} is {there.get(package) or 'missing'} on {host}, and {wanted.get(package) or 'missing'} {where}",
            code="versions-differ",
            hint=f"install the same {name} on all hosts, or allow it with 'ssh: {{versions: any}}'",
        )
