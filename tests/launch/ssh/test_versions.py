"""Comparing the versions of hosts."""

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.ssh.versions import compare, installed

HERE = {"python": "3.12", "tfdist": "1.0", "tensorflow": "", "keras": ""}
HOST = {"python": "3.11", "tfdist": "1.0", "tensorflow": "2.21.0", "keras": "3.12.0"}


def check(other, *, trains=True, same=True):
    compare({"h1": HOST, "h2": {**HOST, **other}}, HERE, trains=trains, same=same)


def test_equal_hosts_may_differ_from_the_launchers_machine():
    check({})


@pytest.mark.parametrize(
    ("other", "code", "values"),
    [
        ({"python": "3.13"}, "versions-differ", ["Python", "3.13 on h2", "3.11 on h1"]),
        ({"tensorflow": "2.20.0"}, "versions-differ", ["TensorFlow", "2.20.0 on h2", "2.21.0 on h1"]),
        ({"keras": ""}, "versions-differ", ["Keras", "missing on h2", "3.12.0 on h1"]),
        ({"tfdist": "0.9"}, "versions-differ", ["tfdist", "0.9 on h2", "1.0 here"]),
        ({"tensorflow": ""}, "no-tensorflow", ["h2"]),
    ],
)
def test_a_difference_names_the_host_and_both_versions(other, code, values):
    with raises(UsageError, code) as caught:
        check(other)
    assert all(value in caught.value.message for value in values)
    assert "h" in str(caught.value.hint)


def test_differences_that_are_allowed():
    check({"tensorflow": "2.20.0", "tfdist": "0.9"}, same=False)
    check({"tensorflow": "", "keras": "", "python": "3.13"}, trains=False)
    with raises(UsageError, "versions-differ"):
        check({"tfdist": "0.9"}, trains=False)
    with raises(UsageError, "no-tensorflow"):
        check({"tensorflow": ""}, same=False)


def test_installed_versions():
    found = installed()
    assert set(found) == set(HERE)
    assert found["tfdist"]
    assert found["python"].count(".") == 1
