"""Names of objects in Kubernetes and container engines."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist_cli.launch.object_names import label


@pytest.mark.parametrize("name", ["digits", "a", "a-1", "x" * 63])
def test_a_label_is_unchanged(name):
    assert label(name) == name


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("Digits", "digits-"),
        ("a'; echo foo", "a-echo-foo-"),
        ("Zürich", "z-rich-"),
        ("7", "x-7-"),
        ("日本", "x-"),
        ("a\nb", "a-b-"),
        ("ä" * 250, "x-"),
        ("x" * 64, "x" * 56 + "-"),
    ],
)
def test_other_names_become_labels(name, begins):
    assert label(name).startswith(begins)
    assert len(label(name)) <= 63


@given(st.text(min_size=1), st.integers(20, 63))
def test_the_result_is_always_a_label(name, most):
    made = label(name, most)
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", made)
    assert len(made) <= most
    assert label(made, most) == made


def test_different_names_stay_different():
    names = ["Digits", "digits", "DIGITS", "digits ", "x" * 64, "x" * 65, "x" * 63]
    assert len({label(name) for name in names}) == len(names)
