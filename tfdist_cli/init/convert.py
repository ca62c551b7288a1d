"""Converts a Keras script: makes and compiles the model under `tfdist.scope()`, and trains it by `tfdist.fit`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tfdist_cli.errors import UsageError
from tfdist_cli.init.model_code import KerasNames, model_statements
from tfdist_cli.init.source_edits import Source

_IMPORT = "import tfdist_cli as tfdist"


@dataclass(frozen=True)
class Converted:
    """A converted script.

    Args:
        text: the new program.
        notes: what the user has to look at, each with its line in the script.
    """

    text: str
    notes: tuple[tuple[int, str], ...] = ()


def convert(text: str, name: str) -> Converted:
    """Converts a script.

    Args:
        text: the script.
        name: its name, for messages.

    Raises:
        UsageError: it is not Python, or trains no model by `fit`.
    """
    source = Source(text)
    try:
        tree = ast.parse(text, name)
    except SyntaxError as error:
        raise UsageError(
            f"{name}:{error.lineno}: Python cannot read the script: {error.msg}",
            code="script-syntax-error",
            hint="correct the line",
        ) from error
    calls = list(_fit_calls(tree))
    if not calls:
        raise UsageError(
            f"{name} has no call model.fit(...) of a compiled Keras model",
            code="no-fit-call",
            hint="name the script that trains, or start from a template: tfdist init --program",
        )
    for call in calls:
        _replace_call(source, call)
    notes: list[tuple[int, str]] = []
    wrapped: list[tuple[int, int]] = []
    for model in dict.fromkeys(_receiver(call) for call in calls):
        lines = model_statements(tree, model)
        if lines is None:
            line = next(call.lineno for call in calls if _receiver(call) == model)
            notes.append((line, f"make and compile {model!r} under `with tfdist.scope():`"))
        elif lines not in wrapped:
            wrapped.append(lines)
            source.indent_under(*lines, "with tfdist.scope():")
    if not _imports_tfdist(tree):
        source.insert_line(_import_line(tree), _IMPORT)
    edited = source.edited()
    try:
        ast.parse(edited)
    except SyntaxError as error:
        raise UsageError(
            f"{name} has statements that cannot be moved under `with tfdist.scope():` by themselves",
            code="cannot-convert",
            hint="change it by hand; see docs/how-to/use-your-own-program.md",
        ) from error
    return Converted(edited, (*sorted(notes), *_backend_notes(tree)))


def _fit_calls(tree: ast.Module) -> Iterator[ast.Call]:
    """Yields the calls of `fit` of models that the script compiles, or that a function of it may have compiled."""
    compiled = {
        node.func.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "compile"
        and isinstance(node.func.value, ast.Name)
    }
    compiled |= KerasNames.of(tree).models(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fit":
            trains = any(keyword.arg == "epochs" for keyword in node.keywords)
            if isinstance(node.func.value, ast.Name) and (trains or node.func.value.id in compiled):
                yield node


def _receiver(call: ast.Call) -> str:
    function = call.func
    if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)):
        raise TypeError(f"{ast.dump(call)} is no call of a method of a variable")
    return function.value.id


def _replace_call(source: Source, call: ast.Call) -> None:
    """Replaces `model.fit(x, y, …)` by `tfdist.fit(model, x, y, …)`, whose other arguments are Keras's."""
    named = [
        f"**{source.of(each.value)}" if each.arg is None else f"{each.arg}={source.of(each.value)}"
        for each in call.keywords
    ]
    source.replace_call(call, "tfdist.fit", [_receiver(call), *map(source.of, call.args), *named])


def _imports_tfdist(tree: ast.Module) -> bool:
    return any(
        alias.name == "tfdist_cli" and alias.asname == "tfdist"
        for node in tree.body
        if isinstance(node, ast.Import)
        for alias in node.names
    )


def _import_line(tree: ast.Module) -> int:
    """Returns the line after which the import of tfdist stands: the last import at the top of the script."""
    line = 0
    for number, node in enumerate(tree.body):
        docstring = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (docstring or isinstance(node, ast.Import | ast.ImportFrom)):
            break
        line = node.end_lineno or node.lineno
    return line


def _backend_notes(tree: ast.Module) -> Sequence[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            key, value = node.targets[0].slice, node.value
            names = isinstance(key, ast.Constant) and key.value == "KERAS_BACKEND"
            if names and isinstance(value, ast.Constant) and value.value != "tensorflow":
                return [(node.lineno, f"Keras uses {value.value!r} here: tfdist trains with TensorFlow")]
    return ()
