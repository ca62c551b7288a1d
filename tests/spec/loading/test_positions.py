"""YAML → tree: places, and everything hostile that a file can hold."""

import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_cli.spec.loading import positions
from tfdist_cli.spec.loading.positions import Broken
from tfdist_cli.spec.loading.problems import Place, SpecError


@pytest.fixture(params=["CSafeLoader", "SafeLoader"], autouse=True)
def parser(request, monkeypatch):
    """Both of PyYAML's parsers: which one there is depends on how it was built."""
    monkeypatch.setattr(positions, "_Loader", getattr(yaml, request.param))


def read_yaml(*args):
    return positions.read_yaml(*args)


def problem(text):
    with pytest.raises(SpecError) as caught:
        read_yaml(text, "f.yaml", {})
    return str(caught.value)


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
    ("text", "expected"),
    [
        ("a: !!python/object/apply:os.system ['true']", "f.yaml:1:4: tags such as tag:yaml.org,2002:python/object/app"),
        ("a: !include x.yaml", "f.yaml:1:4: tags such as !include"),
        ("a: !!str 5", "f.yaml:1:4: tags such as"),
        ("a: ! 5", "f.yaml:1:4: tags such as"),
        ("!!int a: 5", "tags such as"),
        ("a: &x 1\nb: *x", "f.yaml:1:4: anchors (&) and aliases (*) are not read: write the value out"),
        ("a: &x [*x]", "f.yaml:1:4: anchors"),
        ("&x a: 1", "f.yaml:1:1: anchors"),
        ("a: 1\n---\nb: 2", "f.yaml:2:1: a second document starts here"),
        ("? [a]\n: 1", "f.yaml:1:3: a key is text, not a list or a map"),
        ("a: {{b}}", "f.yaml:1:5: a key is text, not a list or a map"),
        ("a:\n\tb: 1", "f.yaml:2:1: a tab cannot indent YAML: use spaces"),
        ("a:\n  b: 1\n \tc: 2", "a tab cannot indent YAML: use spaces"),
        ("a: b: c", "f.yaml:1:5: a second ': ' in one line"),
        ("a: 'x", "a quote is opened and never closed"),
        ("a:\n  b: 1\n c: 2", "f.yaml:3:2: this does not fit the lines above"),
        ("a: [1, 2\nb: 3", "f.yaml:2:"),
        ("a: {n: ${N}}", "between [ ] or { } a ${VAR} needs quotes"),
        ("a: @x", "f.yaml:1:4: a value cannot start with this character"),
        ("a: \0", "f.yaml:1:4: the character '\\x00' cannot stand in YAML"),
        ("a: 1\nb: \x1b[31m", "f.yaml:2:4: the character '\\x1b' cannot stand in YAML"),
        ("a: \ud800", "f.yaml:1:4: the character '\\ud800' cannot stand in YAML"),
        ("[" * 60, "nested more than 50 deep"),
        ("%YAML 7.0\n---\na: 1", "not YAML: "),
    ],
)
def test_refuses(text, expected):
    assert expected in problem(text)


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "a:\n", "? ", "'\\n", '"a\\n', "&a ", "!a "])
def test_a_bomb_is_refused_at_once(opening):
    text = "".join(f"{' ' * depth}a:\n" for depth in range(500)) if opening == "a:\n" else opening * 100_000
    start = time.monotonic()
    assert problem(f"{text}'")
    assert time.monotonic() - start < 5


def test_a_billion_laughs_are_refused():
    assert "anchors" in problem(
        "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    )


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("a: 1\nb: 2\na: 3", ("a",), "the key is given twice (first in line 1): remove one"),
        ("1: 2", ("1",), "a key is text: put it in quotes, '1'"),
        ("true: 2", ("true",), "a key is text"),
        ("~: 2", ("~",), "a key is text"),
        ("a: [{b: '${NO}'}]", ("a", 0, "b"), "the environment variable NO is not set: set it, or write ${NO:-default}"),
        ("a: " + "9" * 200, ("a",), "a number of 200 digits is too long: put it in quotes if it is text"),
    ],
)
def test_a_broken_value_is_told_unless_it_is_replaced(text, path, message):
    root = read_yaml(text, "f", {})
    [(found, _, told)] = root.broken()
    assert found == path
    assert told.startswith(message)


def test_half_a_surrogate_pair_is_refused(parser):
    try:
        assert isinstance(read_yaml('a: "\\ud800"', "f", {}).child("a").content, Broken)
    except SpecError as error:
        assert "not YAML" in str(error)  # noqa: PT017


@settings(max_examples=300)
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
