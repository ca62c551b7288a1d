"""Finds the statements of a script that make and compile a model."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_BUILDERS = {"add", "build", "compile", "load_weights", "set_weights"}
"""Methods of a model that belong to making it."""
_NO_VARIABLES = {"datasets", "utils", "preprocessing", "config", "callbacks"}
"""Parts of Keras that make no variables."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class KerasNames:
    """The names by which a script makes Keras's objects.

    Args:
        imported: what it imports from Keras.
        local: its functions and classes that use those.
    """

    imported: frozenset[str]
    local: frozenset[str]

    @classmethod
    def of(cls, tree: ast.Module) -> KerasNames:
        """Returns the names of a script."""
        imported = frozenset(_imported(tree))
        defined = {node.name: node for node in ast.walk(tree) if isinstance(node, _Function | ast.ClassDef)}
        local: set[str] = set()
        added: set[str] | None = None
        while added is None or added:
            names = cls(imported, frozenset(local))
            added = {name for name, node in defined.items() if name not in local and names.used_in(node)}
            local |= added
        return cls(imported, frozenset(local))

    def used_in(self, node: ast.AST) -> bool:
        """Whether code calls something that makes Keras's objects, or derives from it."""
        used = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
        used += [base for each in ast.walk(node) if isinstance(each, ast.ClassDef) for base in each.bases]
        return any(self._makes(_path(each)) for each in used)

    def models(self, tree: ast.Module) -> set[str]:
        """The variables that get the result of a function of the script that compiles a model."""
        compiling = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, _Function) and node.name in self.local and "compile" in _methods(node)
        }
        return {
            name
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            if _path(node.value.func)[:1] and _path(node.value.func)[0] in compiling
            for name in _assigned(node)
        }

    def _makes(self, path: Sequence[str]) -> bool:
        if not path or _NO_VARIABLES.intersection(path):
            return False
        return path[0] in self.imported | self.local or (path[0] in ("tf", "tensorflow") and "keras" in path)


def model_statements(tree: ast.Module, model: str) -> tuple[int, int] | None:
    """Returns the first and the last line of the statements that make and compile a model; None if none is found.

    Args:
        tree: the script.
        model: the model's variable.
    """
    names = KerasNames.of(tree)
    for simple in (True, False):
        for block in _blocks(tree):
            made = [n for n, each in enumerate(block) if model in _assigned(each) and names.used_in(each)]
            made = [n for n in made if isinstance(block[n], ast.Assign | ast.AnnAssign) or not simple]
            if made:
                built = {n for n, statement in enumerate(block) if _builds(statement, model)}
                last = max({made[-1], *built})
                first = _first_needed(block[: last + 1], {made[0], *built}, names)
                return _first_line(block[first]), block[last].end_lineno or block[last].lineno
    return None


def _first_needed(block: Sequence[ast.stmt], seeds: set[int], names: KerasNames) -> int:
    """Returns the index of the first statement that makes a Keras object which others of a model need."""
    chosen, needed = set(seeds), set().union(*(_read(block[n]) for n in seeds))
    for number in range(len(block) - 1, -1, -1):
        statement = block[number]
        if isinstance(statement, _Function | ast.ClassDef | ast.Import | ast.ImportFrom):
            continue
        uses = names.used_in(statement) or any(called in needed for called in _called(statement))
        if number not in chosen and _assigned(statement) & needed and uses:
            chosen.add(number)
            needed |= _read(statement)
    return min(chosen)


def _builds(statement: ast.stmt, model: str) -> bool:
    if isinstance(statement, _Function | ast.ClassDef):
        return False
    calls = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
    paths = [_path(function) for function in calls]
    return any(len(path) == 2 and path[0] == model and path[1] in _BUILDERS for path in paths)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yields the names of modules and classes of Keras, also of `layers = keras.layers`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named = [(alias.name.split("."), alias.asname or alias.name.partition(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")
            named = [([*module, alias.name], alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            named = [(_path(node.value), name) for name in _assigned(node)]
        else:
            continue
        yield from (name for path, name in named if "keras" in path and not _NO_VARIABLES.intersection(path))


def _blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Yields the lists of statements of a script, from the top inwards."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _path(function: ast.expr) -> list[str]:
    """Returns the names of `a.b.c`; [] for other expressions."""
    parts: list[str] = []
    while isinstance(function, ast.Attribute):
        parts.insert(0, function.attr)
        function = function.value
    return [function.id, *parts] if isinstance(function, ast.Name) else []


def _methods(node: ast.AST) -> set[str]:
    return {
        each.func.attr for each in ast.walk(node) if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)
    }


def _called(node: ast.AST) -> set[str]:
    return {path[0] for each in ast.walk(node) if isinstance(each, ast.Call) and (path := _path(each.func))}


def _assigned(statement: ast.AST) -> set[str]:
    """Returns the variables that a statement, or one within it, assigns."""
    if isinstance(statement, _Function | ast.ClassDef):
        return set()
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _read(statement: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min(statement.lineno, *(each.lineno for each in decorators), statement.lineno)
