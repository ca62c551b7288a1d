"""Hosts that fit together, and others."""

import pytest

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.ssh.versions import compare, installed

HERE = {"python": "3.12", "tfdist": "1.0", "tensorflow": "", "keras": ""}
HOST = {"python": "3.11", "tfdist": "1.0", "tensorflow": "2.21.0", "keras": "3.12.0"}


def check(other, *, trains=True, same=True):
    compare({"h1": HOST, "h2": {**HOST, **other}}, HERE, trains=trains, same=same)


def test_hosts_that_are_alike_may_differ_from_the_launchers_machine():
    check({})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"python": "3.13"}, "h2 has Python 3.13, and on h1 it is 3.11"),
        ({"tensorflow": "2.20.0"}, "h2 has TensorFlow 2.20.0, and on h1 it is 2.21.0"),
        ({"keras": ""}, "h2 has Keras not at all, and on h1 it is 3.12.0"),
        ({"tfdist": "0.9"}, "h2 has tfdist 0.9, and here it is 1.0"),
        ({"tensorflow": ""}, "TensorFlow is not installed on h2"),
    ],
)
def test_a_difference_names_the_host_and_both(other, message):
    with pytest.raises(UsageError, match=message) as caught:
        check(other)
    assert "h" in str(caught.value.hint)


def test_differences_that_are_allowed():
    check({"tensorflow": "2.20.0", "tfdist": "0.9"}, same=False)
    check({"tensorflow": "", "keras": "", "python": "3.13"}, trains=False)
    with pytest.raises(UsageError, match="tfdist"):
        check({"tfdist": "0.9"}, trains=False)
    with pytest.raises(UsageError, match="not installed on h2"):
        check({"tensorflow": ""}, same=False)


def test_what_is_installed_here():
    found = installed()
    assert set(found) == set(HERE)
    assert found["tfdist"]
    assert found["python"].count(".") == 1
