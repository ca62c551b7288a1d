"""Translates the errors of pydantic into problems with a place in the file and a message in plain words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import ValidationError

from tfdist_cli.errors import code_of
from tfdist_cli.spec.loading.keys import model_at, suggest
from tfdist_cli.spec.loading.positions import Node, Unusable
from tfdist_cli.spec.loading.problems import CONFIDENTIAL, KeyPath, Place, Problem, dotted, either
from tfdist_cli.spec.sections.model import Inconsistent, SpecModel, descriptions
from tfdist_cli.spec.sections.role_spec import RoleSpec

Details = Mapping[str, Any]
"""One entry of `ValidationError.errors()`."""


@dataclass(frozen=True)
class _Wording:
    """The message, and the code, for one of pydantic's types of errors.

    Args:
        text: `expected …`, to which the value is added, or the whole message. `{name}` stands for a value of the
            error's context.
        code: the stable name of the problem.
    """

    text: str
    code: str


_WORDINGS = {
    "int_type": _Wording("expected a whole number", code="wrong-type"),
    "float_type": _Wording("expected a number", code="wrong-type"),
    "string_type": _Wording("expected text", code="wrong-type"),
    "bool_type": _Wording("expected true or false", code="wrong-type"),
    "list_type": _Wording("expected a list", code="wrong-type"),
    "dict_type": _Wording("expected a map, key: value", code="wrong-type"),
    "model_type": _Wording("expected a map, key: value", code="wrong-type"),
    "literal_error": _Wording("expected {expected}", code="unknown-choice"),
    "finite_number": _Wording("expected a finite number", code="out-of-range"),
    "greater_than_equal": _Wording("expected {ge} or more", code="out-of-range"),
    "greater_than": _Wording("expected more than {gt}", code="out-of-range"),
    "less_than_equal": _Wording("expected at most {le}", code="out-of-range"),
    "less_than": _Wording("expected less than {lt}", code="out-of-range"),
    "too_short": _Wording("the list is empty: name at least one, or remove the key", code="empty-list"),
    "string_too_short": _Wording("the text is empty", code="empty-text"),
    "string_too_long": _Wording("longer than {max_length} characters", code="too-long"),
}
_EXPECTED = "expected "
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
    """The code of the first alternative of a union that says more than `wrong-type`."""
    for details in alternatives:
        if details["type"] == "value_error":
            return code_of(details["ctx"]["error"])
    found = (_WORDINGS.get(details["type"]) for details in alternatives)
    codes = ["invalid-value" if wording is None else wording.code for wording in found]
    if not isinstance(got, str):  # choices are text: another type is none of them
        codes = ["wrong-type" if code == "unknown-choice" else code for code in codes]
    return next((code for code in codes if code != "wrong-type"), "wrong-type")


def _message(alternatives: Sequence[Details], got: Any, *, hidden: bool) -> str:
    expected = []
    for details in alternatives:
        kind, context = details["type"], details.get("ctx", {})
        if kind == "value_error":
            return str(context["error"])
        if kind not in _WORDINGS:
            return str(details["msg"])
        text = _WORDINGS[kind].text.format(**context)
        if not text.startswith(_EXPECTED):
            return text
        expected.append(text.removeprefix(_EXPECTED))
    shown = _kind(got) if hidden else _shown(got)
    return f"{_EXPECTED}{either(expected)}, got {shown}{_advice(expected, alternatives, got)}"


def _advice(expected: Sequence[str], alternatives: Sequence[Details], got: Any) -> str:
    if "text" in expected and isinstance(got, bool | int | float):
        return ": put it in quotes"
    if {"a whole number", "a number"} & set(expected) and isinstance(got, str) and got.strip().isdigit():
        return " in quotes: remove the quotes"
    if got is None and {details["type"] for details in alternatives} == {"model_type"}:
        return ": write {} for the defaults, or remove the key"
    if _is_count(got) and {details.get("ctx", {}).get("class_name") for details in alternatives} == {RoleSpec.__name__}:
        return f": write {{replicas: {got}}}"
    choices = [choice for details in alternatives for choice in _choices(details)]
    near = get_close_matches(got, choices, n=1) if isinstance(got, str) else []
    return f", did you mean {near[0]!r}?" if near else ""


def _is_count(got: Any) -> bool:
    """Returns whether a value is a number of tasks, in quotes or not."""
    return isinstance(got, int | str) and not isinstance(got, bool) and str(got).isdecimal()


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
    key = str(path[-1])
    values = [repr(value) for value in get_args(owner.model_fields[key].annotation) if isinstance(value, str)]
    if values:
        return f"expected {either(values)}"
    description = " ".join(re.split(r"\.(?:\s|$)", descriptions(owner)[key])[0].split()).replace("`", "")
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
