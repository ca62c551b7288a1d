"""Unquoted scalars mean what YAML 1.2 says."""

import math

import pytest

from tfdist_cli.errors import InvalidValue
from tfdist_cli.spec.loading.scalars import is_text, resolve


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("~", None),
        ("null", None),
        ("true", True),
        ("False", False),
        ("12", 12),
        ("-3", -3),
        ("0644", 644),
        ("0o644", 0o644),
        ("0xff", 255),
        ("1e-3", 1e-3),
        ("1E3", 1000.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("-1.5e+10", -1.5e10),
        (".inf", math.inf),
        ("-.INF", -math.inf),
    ],
)
def test_core_schema(text, value):
    assert resolve(text) == value
    assert type(resolve(text)) is type(value)
    assert not is_text(text)


def test_nan():
    assert str(resolve(".NaN")) == "nan"


@pytest.mark.parametrize(
    "text",
    [
        "on",
        "off",
        "yes",
        "no",
        "y",
        "N",
        "10:2222",
        "22:22",
        "1_000",
        "2024-01-01",
        "0b11",
        "1e",
        "e3",
        ".",
        "-",
        "0x",
        "nULL",
        "inf",
        "nan",
        "<<",
        "=",
        "１",  # noqa: RUF001
    ],
)
def test_what_yaml_1_1_would_turn_into_something_else_is_text(text):
    assert resolve(text) == text
    assert is_text(text)


def test_numbers_have_an_end():
    with pytest.raises(InvalidValue) as caught:
        resolve("9" * 5000)
    assert caught.value.code == "out-of-range"
