"""The versions that `make compat` tests are those that pyproject.toml allows."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^([\w-]+)(?:==|>=)([\w.]+)", re.MULTILINE)


def pins(file):
    return dict(PIN.findall((ROOT / "tests" / "compat" / file).read_text()))


def test_the_oldest_versions_are_the_lower_bounds():
    toml = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    project = toml.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = dict(PIN.findall("\n".join([*project["dependencies"], *project["optional-dependencies"]["cpu"]])))
    oldest = pins("oldest.txt")
    assert oldest.keys() == bounds.keys()
    for name, bound in bounds.items():
        assert re.fullmatch(rf"{re.escape(bound)}(\.0)*", oldest[name]), name


def test_the_newest_versions_are_not_older_than_those_of_every_other_test():
    newest = pins("newest.txt")
    constraints = dict(PIN.findall((ROOT / "constraints.txt").read_text()))  # a package's last line is its newest

    def numbers(version):
        return [int(part) for part in re.findall(r"\d+", version.partition("rc")[0])]

    for name in ("keras", "tensorflow", "tensorflow-cpu"):
        assert numbers(newest[name]) >= numbers(constraints[name])
