"""YAML → tree: places, and everything hostile that a file can hold."""

import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.problems import problems_of
from tfdist_cli.spec.loading import positions
from tfdist_cli.spec.loading.positions import Unusable
from tfdist_cli.spec.loading.problems import Place, SpecError


@pytest.fixture(params=["CSafeLoader", "SafeLoader"], autouse=True)
def parser(request, monkeypatch):
    """Both of PyYAML's parsers: which one there is depends on how it was built."""
    monkeypatch.setattr(positions, "_Loader", getattr(yaml, request.param))


def read_yaml(*args):
    return positions.read_yaml(*args)


def problem(text):
    """The one problem of a document."""
    [found] = problems_of(read_yaml, text, "f.yaml", {})
    return found


def test_values():
    text = "a: 1\nb: [x, 1e-3, '2', on]\nc:\n  d: null\n  e: {f: 10:22}\ng: |\n  two\n  lines\n'3': ''\n"
    assert read_yaml(text, "f", {}).plain() == {
        "a": 1,
        "b": ["x", 0.001, "2", "on"],
        "c": {"d": None, "e": {"f": "10:22"}},
        "g": "two\nlines\n",
        "3": "",
    }


def test_places():
    root = read_yaml("a:\n  - é: x\n    bb: y\n", "f", {})
    item = root.child("a").child(0)
    assert root.child("a").key_place == Place("f", 1, 1)
    assert item.place == Place("f", 2, 5)
    assert item.child("é").place == Place("f", 2, 8)
    assert item.child("bb").key_place == Place("f", 3, 5)
    assert root.child("b") is item.child(0) is root.child("a").child(1) is root.child("a").child(-1) is None


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "--- \n...\n"])
def test_nothing(text):
    assert read_yaml(text, "f", {}).plain() is None


@pytest.mark.parametrize(
    ("text", "place", "code"),
    [
        ("a: !!python/object/apply:os.system ['true']", "1:4", "yaml-tag"),
        ("a: !include x.yaml", "1:4", "yaml-tag"),
        ("a: !!str 5", "1:4", "yaml-tag"),
        ("a: ! 5", "1:4", "yaml-tag"),
        ("!!int a: 5", "", "yaml-tag"),
        ("a: &x 1\nb: *x", "1:4", "yaml-anchor"),
        ("a: &x [*x]", "1:4", "yaml-anchor"),
        ("&x a: 1", "1:1", "yaml-anchor"),
        ("a: 1\n---\nb: 2", "2:1", "several-documents"),
        ("? [a]\n: 1", "1:3", "key-not-text"),
        ("a: {{b}}", "1:5", "key-not-text"),
        ("a:\n\tb: 1", "2:1", "tab"),
        ("a:\n  b: 1\n \tc: 2", "", "tab"),
        ("a: b: c", "1:5", "not-yaml"),
        ("a: 'x", "", "not-yaml"),
        ("a:\n  b: 1\n c: 2", "3:2", "not-yaml"),
        ("a: [1, 2\nb: 3", "2:", "not-yaml"),
        ("a: {n: ${N}}", "", "variable-not-quoted"),
        ("a: @x", "1:4", "not-yaml"),
        ("a: \0", "1:4", "invalid-character"),
        ("a: 1\nb: \x1b[31m", "2:4", "invalid-character"),
        ("a: \ud800", "1:4", "invalid-character"),
        ("[" * 60, "", "nested-too-deep"),
        ("%YAML 7.0\n---\na: 1", "", "not-yaml"),
    ],
)
def test_refuses(text, place, code):
    found = problem(text)
    assert found.code == code
    assert str(found.place).startswith(f"f.yaml:{place}" if place else "f.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [("a: b: c", "': '"), ("a: 'x", "quote"), ("a:\n  b: 1\n c: 2", "indentation"), ("a: @x", "quotes")],
)
def test_syntax_errors_are_explained_in_plain_words(text, words):
    message = problem(text).message
    assert words in message
    assert "token" not in message


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "a:\n", "? ", "'\\n", '"a\\n', "&a ", "!a "])
def test_a_bomb_is_refused_at_once(opening):
    text = "".join(f"{' ' * depth}a:\n" for depth in range(500)) if opening == "a:\n" else opening * 100_000
    start = time.process_time()  # other programs may use the machine, too
    assert problem(f"{text}'")
    assert time.process_time() - start < 5


def test_a_billion_laughs_are_refused():
    lines = (f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    assert problem("a: &a [x, x]\n" + "".join(lines)).code == "yaml-anchor"


@pytest.mark.parametrize(
    ("text", "path", "code", "value"),
    [
        ("a: 1\nb: 2\na: 3", "a", "duplicate-key", "line 1"),
        ("1: 2", "1", "key-not-text", "'1'"),
        ("true: 2", "true", "key-not-text", "'true'"),
        ("~: 2", "~", "key-not-text", "'~'"),
        ("a: [{b: '${NO}'}]", "a.0.b", "variable-not-set", "${NO:-default}"),
        ("a: " + "9" * 200, "a", "out-of-range", "200"),
    ],
)
def test_an_unusable_value_is_a_problem_unless_it_is_replaced(text, path, code, value):
    [found] = read_yaml(text, "f", {}).problems()
    assert (found.key, found.code) == (path, code)
    assert value in found.message


def test_half_a_surrogate_pair_is_refused(parser):
    try:
        assert isinstance(read_yaml('a: "\\ud800"', "f", {}).child("a").content, Unusable)
    except SpecError as error:
        assert error.code == "not-yaml"  # noqa: PT017


@settings(max_examples=100)
@given(
    st.one_of(
        st.text(), st.text("ab:-[]{}&*!|>'\"%@`#?,~ \n\t$0"), st.binary().map(lambda data: data.decode("latin-1"))
    )
)
def test_any_text_is_a_tree_or_a_spec_error(text):
    try:
        read_yaml(text, "f", {"a": "b"}).plain()
    except SpecError as error:
        assert error.problems  # noqa: PT017


def test_the_parser_reads_what_ships():
    for path in Path(__file__).parents[3].glob("*/*.yaml"):
        assert isinstance(read_yaml(path.read_text(), path.name, {}).plain(), dict)
