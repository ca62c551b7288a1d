"""Wording is pinned once, in docs/reference/messages.md; everything else compares codes and values."""

import ast
import re
from dataclasses import fields

from tests.support.messages import PACKAGE, PAGE, messages, page
from tests.support.prose import asserts_of_prose
from tests.support.sources import syntax_tree
from tfdist_cli.spec.loading.problems import Problem

MOST_ASSERTS_OF_PROSE = 60
PRIVATE_WORDS = re.compile(
    r"(?<![a-z])(nursery|crew|workshop|turnstile|cadence|tally|parcels?|reception|chronicle|blame|foreseen?|watchman)"
    r"(?![a-z])",
    re.IGNORECASE,
)
"""Words that neither TensorFlow, Keras nor Kubernetes use; the glossary has the ones to use. Parts of names count."""
CODE = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def error_classes() -> set[str]:
    """The names of all errors for users."""
    found, before = {"TfdistError"}, set()
    classes = [
        node for path in PACKAGE.rglob("*.py") for node in ast.walk(syntax_tree(path)) if isinstance(node, ast.ClassDef)
    ]
    while found != before:
        before = set(found)
        found |= {
            each.name for each in classes if {base.id for base in each.bases if isinstance(base, ast.Name)} & found
        }
    return found


def test_every_error_has_a_code():
    names = error_classes() - {"SpecError"} | {"Problem"}  # a SpecError has its problems' codes
    without = [
        f"{node.func.id}, {path}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
        if not any(keyword.arg in ("code", None) for keyword in node.keywords)
        if not (node.func.id == "Problem" and len(node.args) == len(fields(Problem)))
    ]
    assert not without


def test_codes_are_short_names():
    assert not [each for each in messages() if not CODE.fullmatch(each.code) or len(each.code) > 40]


def test_messages_are_those_of_the_page():
    assert PAGE.read_text() == page(), "run `python -m tests.support.messages` and read what has changed"


def test_tests_compare_codes_and_values():
    found = list(asserts_of_prose())
    assert len(found) <= MOST_ASSERTS_OF_PROSE, found


def test_words_are_the_fields():
    found = {path: PRIVATE_WORDS.findall(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert not {path: words for path, words in found.items() if words}
