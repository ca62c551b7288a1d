"""Translates the errors of pydantic into problems with a place in the file and a message in plain words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import ValidationError

from tfdist_cli.errors import code_of
from tfdist_cli.spec.loading.keys import model_at, suggest
from tfdist_cli.spec.loading.positions import Node, Unusable
from tfdist_cli.spec.loading.problems import CONFIDENTIAL, KeyPath, Place, Problem, dotted, either
from tfdist_cli.spec.sections.model import Inconsistent, SpecModel

Details = Mapping[str, Any]
"""One entry of `ValidationError.errors()`."""

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a map, key: value",
    "model_type": "a map, key: value",
    "literal_error": "{expected}",
    "greater_than_equal": "{ge} or more",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
}
_MESSAGES = {
    "too_short": "the list is empty: name at least one, or remove the key",
    "string_too_short": "the text is empty",
    "string_too_long": "longer than {max_length} characters",
}
_CODES = {
    "greater_than_equal": "out-of-range",
    "greater_than": "out-of-range",
    "less_than_equal": "out-of-range",
    "less_than": "out-of-range",
    "finite_number": "out-of-range",
    "literal_error": "unknown-choice",
    "too_short": "empty-list",
    "string_too_short": "empty-text",
    "string_too_long": "too-long",
}
"""The codes of pydantic's types of errors. The first one that occurs in a union counts; all others are `wrong-type`."""
_TEXT_SHOWN = 60


def explain(error: ValidationError, tree: Node, model: type[SpecModel]) -> Iterator[Problem]:
    """Yields each problem once. Pydantic reports a problem once for each alternative of a union.

    Args:
        error: the error that validating `tree.plain()` raised.
        tree: the values and their places.
        model: the model that the tree was validated against.
    """
    by_path: dict[KeyPath, list[Details]] = {}
    of_unions = set()
    for details in error.errors(include_url=False):
        path = _path(tree, details)
        by_path.setdefault(path, []).append(details)
        if len(path) < len(details["loc"]):
            of_unions.add(path)
    above = {path[:length] for path in by_path for length in range(len(path))}
    for path, alternatives in by_path.items():
        if path in of_unions and path in above:
            continue  # a problem of one item in the list or map is more precise
        if not isinstance(_node(tree, path).content, Unusable):
            yield from _problems(path, alternatives, tree, model)


def _path(tree: Node, details: Details) -> KeyPath:
    """The keys and indices of an error's `loc`, without the names of the alternatives of unions."""
    path: list[str | int] = []
    node = tree
    for part in details["loc"]:
        child = node.child(part)
        if child is not None:
            node = child
            path.append(part)
    if details["type"] == "missing":
        path.append(details["loc"][-1])
    return tuple(path)


def _problems(path: KeyPath, alternatives: Sequence[Details], tree: Node, model: type[SpecModel]) -> Iterator[Problem]:
    node = _node(tree, path)
    first = alternatives[0]
    reason = first.get("ctx", {}).get("error")
    if isinstance(reason, Inconsistent):
        for problem in reason.problems:
            at = (*path, *problem.keys)
            yield Problem(_place(_node(tree, at)), dotted(at), problem.message, problem.code)
    elif first["type"] == "extra_forbidden":
        siblings = model_at(model, path[:-1]) or model
        message = f"unknown key, {suggest(str(path[-1]), siblings, model)}"
        yield Problem(node.key_place or node.place, dotted(path), message, code="unknown-key")
    elif first["type"] == "missing":
        yield Problem(_place(node), dotted(path), f"missing key, {_purpose(path, model)}", code="missing-key")
    else:
        hidden = bool(set(CONFIDENTIAL) & set(path))
        message = _message(alternatives, node.content, hidden=hidden)
        yield Problem(node.place, dotted(path), message, _code(alternatives, node.content))


def _code(alternatives: Sequence[Details], got: Any) -> str:
    for details in alternatives:
        if details["type"] == "value_error":
            return code_of(details["ctx"]["error"])
    codes = [_CODES.get(details["type"], "wrong-type") for details in alternatives]
    if "unknown-choice" in codes and not isinstance(got, str):  # a choice is text
        codes = [code for code in codes if code != "unknown-choice"] or ["wrong-type"]
    return next((code for code in codes if code != "wrong-type"), "wrong-type")


def _message(alternatives: Sequence[Details], got: Any, *, hidden: bool) -> str:
    expected = []
    for details in alternatives:
        kind, context = details["type"], details.get("ctx", {})
        if kind == "value_error":
            return str(context["error"])
        if kind in _MESSAGES:
            return _MESSAGES[kind].format(**context)
        if kind not in _EXPECTED:
            return str(details["msg"])
        expected.append(_EXPECTED[kind].format(**context))
    shown = _kind(got) if hidden else _shown(got)
    return f"expected {either(expected)}, got {shown}{_advice(expected, alternatives, got)}"


def _advice(expected: Sequence[str], alternatives: Sequence[Details], got: Any) -> str:
    if "text" in expected and isinstance(got, bool | int | float):
        return ": put it in quotes"
    if {"a whole number", "a number"} & set(expected) and isinstance(got, str) and got.strip().isdigit():
        return " in quotes: remove the quotes"
    if got is None and expected == [_EXPECTED["model_type"]]:
        return ": write {} for the defaults, or remove the key"
    choices = [choice for details in alternatives for choice in _choices(details)]
    near = get_close_matches(got, choices, n=1) if isinstance(got, str) else []
    return f", did you mean {near[0]!r}?" if near else ""


def _choices(details: Details) -> list[str]:
    listed = details.get("ctx", {}).get("expected", "")
    return [word.strip("'") for word in listed.replace(" or ", ", ").split(", ")] if listed else []


def _kind(got: Any) -> str:
    kinds = {dict: "a map", list: "a list", type(None): "nothing", bool: "true or false", str: "text"}
    return kinds.get(type(got), "a number")


def _shown(got: Any) -> str:
    if got is None or isinstance(got, dict | list):
        return _kind(got)
    if isinstance(got, bool):
        return str(got).lower()
    text = repr(got)
    return text if len(text) <= _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]}..."


def _purpose(path: KeyPath, model: type[SpecModel]) -> str:
    """The values or the description of a missing key."""
    owner = model_at(model, path[:-1]) or model
    field = owner.model_fields[str(path[-1])]
    values = [repr(value) for value in get_args(field.annotation) if isinstance(value, str)]
    if values:
        return f"expected {either(values)}"
    description = (field.description or "").split(".")[0].replace("`", "")
    return f"expected {description[:1].lower()}{description[1:]}"


def _node(tree: Node, path: KeyPath) -> Node:
    """The node at `path`, or the last node on the way to it."""
    for part in path:
        child = tree.child(part)
        if child is None:
            break
        tree = child
    return tree


def _place(node: Node) -> Place:
    return node.key_place or node.place
