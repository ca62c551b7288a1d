"""Asserts that pin prose: they break when a sentence is improved, and hold when the behaviour is broken."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.sources import syntax_tree

TESTS = Path(__file__).parents[1]
_WORD = re.compile(r"[A-Za-z']+[,.:;?!]?")
"""A word of a sentence: paths, options, numbers and dotted keys are values, not words."""
_LEAST_WORDS = 4


def asserts_of_prose() -> Iterator[str]:
    """`file:line` of every assert, and every `match=` of `pytest.raises`, with a string of four words or more."""
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.stmt | ast.expr) and any(
                _is_prose(text) for part in _expected(node) for text in _strings(part)
            ):
                yield f"{path.relative_to(TESTS)}:{node.lineno}"


def _expected(node: ast.stmt | ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.Assert):
        return [node.test]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "raises":
        return [keyword.value for keyword in node.keywords if keyword.arg == "match"]
    return []


def _strings(part: ast.expr) -> Iterator[str]:
    for node in ast.walk(part):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _is_prose(text: str) -> bool:
    return sum(bool(_WORD.fullmatch(token)) for token in text.split()) >= _LEAST_WORDS
