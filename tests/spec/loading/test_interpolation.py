"""`${VAR}` in scalars."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist_cli.errors import InvalidValue
from tfdist_cli.spec.loading.interpolation import escape, read_scalar

ENVIRON = {"N": "2", "NAME": "digits", "EMPTY": "", "YAML": "a: b\n- c", "DOLLAR": "${N} $$", "NOT_UTF8": "\udcff"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${N}", 2),
        ("${MISSING:-3}", 3),
        ("${MISSING:-}", None),
        ("${EMPTY:-4}", 4),
        ("${EMPTY}", None),
        ("${MISSING:-true}", True),
        ("${NAME}", "digits"),
        ("gpu${N}", "gpu2"),
        ("${N}${N}", "22"),
        ("${MISSING:-a:-b c}", "a:-b c"),
        ("${YAML}", "a: b\n- c"),
        ("${DOLLAR}", "${N} $$"),
        ("$$", "$"),
        ("$${N}", "${N}"),
        ("$$${N}", "$2"),
        ("$N", "$N"),
        ("a$", "a$"),
        ("5", 5),
    ],
)
def test_plain(text, value):
    assert read_scalar(text, ENVIRON, plain=True) == value


@pytest.mark.parametrize(("text", "value"), [("${N}", "2"), ("5", "5"), ("${MISSING:-true}", "true"), ("null", "null")])
def test_quoted_stays_text(text, value):
    assert read_scalar(text, ENVIRON, plain=False) == value


@pytest.mark.parametrize(
    ("text", "code", "value"),
    [
        ("${MISSING}", "variable-not-set", "${MISSING:-default}"),
        ("${}", "malformed-variable", "${}"),
        ("${1A}", "malformed-variable", "${1A}"),
        ("${N-2}", "malformed-variable", "'${N-2}'"),
        ("${N:-${M}}", "malformed-variable", "${"),
        ("${N", "malformed-variable", "${N"),
        ("${NOT_UTF8}", "not-utf-8", "NOT_UTF8"),
    ],
)
def test_refuses(text, code, value):
    with pytest.raises(InvalidValue) as caught:
        read_scalar(text, ENVIRON, plain=True)
    assert caught.value.code == code
    assert value in str(caught.value)


@given(st.text(), st.booleans())
def test_escaped_text_comes_back(text, plain):
    assert read_scalar(escape(text), {}, plain=False) == text
    if "$" in text:
        assert read_scalar(escape(text), {}, plain=plain) == text


@given(st.text("${}:-AB "), st.dictionaries(st.sampled_from("AB"), st.text("$ {}1")))
def test_any_text_is_a_scalar_or_a_value_error(text, environ):
    try:
        read_scalar(text, environ, plain=True)
    except InvalidValue as error:
        assert error.code  # noqa: PT017
