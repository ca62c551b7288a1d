"""Reads the source of a recipe's module, without importing it, for mistakes that would end each task's start."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist_cli.finding import Finding

FUNCTIONS = {"model": ("params",), "dataset": ("params", "split", "shard"), "callbacks": ("params",)}
"""The functions that a recipe's module defines, each with its parameters."""
_OPTIONAL = {"callbacks"}
_CALLS_PYTHON = {"from_generator", "numpy_function", "py_function"}
"""Functions of tf.data whose Python code may choose the shard later."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class ModuleSource:
    """The source of a recipe's module.

    Args:
        path: the file.
        tree: its syntax tree.
    """

    path: Path
    tree: ast.Module

    @property
    def functions(self) -> dict[str, _Function]:
        """The functions that the module defines at its top level."""
        return {node.name: node for node in self.tree.body if isinstance(node, _Function)}

    @property
    def imported(self) -> Iterator[tuple[str, int]]:
        """The top names of the modules that it imports whenever it is imported, each with its line."""
        for node in self.tree.body:
            if isinstance(node, ast.Import):
                yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield node.module.partition(".")[0], node.lineno

    def place(self, name: str = "") -> str:
        """Returns the file, with the line of a function that it defines."""
        function = self.functions.get(name)
        return f"{self.path}:{function.lineno}" if function else str(self.path)


def read_module(path: Path) -> ModuleSource | Finding:
    """Returns the source of a module, or why it is no Python."""
    try:
        return ModuleSource(path, ast.parse(path.read_bytes(), str(path)))
    except SyntaxError as error:
        return Finding(
            code="module-syntax-error",
            level="error",
            place=f"{path}:{error.lineno or 1}",
            message=f"Python cannot read the recipe's module: {error.msg}",
            fix="correct the line; tasks would fail when they import the module",
        )


def function_findings(source: ModuleSource) -> Iterator[Finding]:
    """Yields the functions that are missing, and those that cannot be called as a recipe's are."""
    bound = _names(source.tree)
    for name, parameters in FUNCTIONS.items():
        form = f"{name}({', '.join(parameters)})"
        function = source.functions.get(name)
        if bound is not None and name not in bound and name not in _OPTIONAL:
            yield Finding(
                code="recipe-function-missing",
                level="error",
                place=str(source.path),
                message=f"the recipe's module has no function {name!r}",
                fix=f"define {form} in it; see docs/reference/recipe.md",
            )
        elif function and not function.decorator_list and not _takes(function, len(parameters)):
            yield Finding(
                code="recipe-function-parameters",
                level="error",
                place=source.place(name),
                message=f"{name} cannot be called with {len(parameters)} arguments",
                fix=f"define it as {form}",
            )


def data_findings(source: ModuleSource, shards: int) -> Iterator[Finding]:
    """Yields what is wrong with `dataset`: it ignores its shard.

    Args:
        source: the module.
        shards: the number of shards that the data is split into.
    """
    function = source.functions.get("dataset")
    if function is None or function.decorator_list or not _takes(function, 3):
        return
    read = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    parameters = [*function.args.posonlyargs, *function.args.args]
    used = len(parameters) != 3 or parameters[2].arg in read | {"_"} or "locals" in read
    yields = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own_nodes(function.body))
    if shards == 1 or used or yields:
        return
    own = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    calls_python = any(isinstance(node, ast.Attribute) and node.attr in _CALLS_PYTHON for node in ast.walk(source.tree))
    yield Finding(
        code="shard-ignored",
        level="error" if "Dataset" in own and not calls_python else "warning",
        place=source.place("dataset"),
        message=f"dataset() does not use its shard. If it returns a tf.data.Dataset, each of {shards} workers would "
        "train on all data",
        fix="return dataset.shard(shard.count, shard.index); if each worker is to train on all data, write "
        "train: {share: copy} in the recipe",
    )


def _names(tree: ast.Module) -> set[str] | None:
    """Returns the names that a module may bind at its top level; None if it cannot be known."""
    found: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Name) and node.id in ("globals", "setattr", "exec"):
            return None
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)
    return None if "*" in found or "__getattr__" in found else found


def _takes(function: _Function, count: int) -> bool:
    """Whether a function can be called with a number of positional arguments."""
    arguments = function.args
    positional = len(arguments.posonlyargs) + len(arguments.args)
    least = positional - len(arguments.defaults)
    required = any(default is None for default in arguments.kw_defaults)
    return least <= count and (count <= positional or arguments.vararg is not None) and not required


def _own_nodes(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yields the nodes of a function, without those of functions inside of it."""
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield node
            yield from _own_nodes(list(ast.iter_child_nodes(node)))
