"""Decides which commands run in a fork of a process that has imported TensorFlow: where that changes nothing for them.

tfdist's own tasks do. A user's program does if this interpreter would run it without options, it imports TensorFlow
itself, everything else that it imports is Python's own or TensorFlow's, and neither it nor a module beside it changes
the environment: such a change would take effect before the import in an interpreter, and too late in a fork.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

_TRAINS = {"keras", "tensorflow", "tfdist_cli"}
_IMPORTED = {"absl", "h5py", "ml_dtypes", "numpy", *_TRAINS}
"""Packages that the fork server has imported, and whose import changes nothing in a program."""
_BY_NAME = {"importlib", "pkgutil", "runpy"}
"""Modules by which a program may import others that are not seen here."""
_ABOVE = ".."
"""Stands for the modules of a relative import that leads out of the program's folder."""
_READING = {"get", "copy", "items", "keys", "values"}
_MOST_FILES = 200


def can_fork(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether a command may run in a fork, on a system that supports fork servers: Linux from 5.3 on.

    Args:
        argv: the command.
        env: its whole environment.
    """
    able = sys.platform.startswith("linux") and hasattr(os, "pidfd_open") and hasattr(os, "memfd_create")
    if not able:
        return False
    if tuple(argv[:4]) == (sys.executable, "-m", "tfdist_cli", "role"):
        return True
    return _trains(argv, env) and obstacle(argv, env) is None


def obstacle(argv: Sequence[str], env: Mapping[str, str]) -> str | None:
    """Returns why a program that imports TensorFlow does not run in a fork; None if it does, or is no such program."""
    return _obstacle(*_key(argv, env)) if _trains(argv, env) else None


def _key(argv: Sequence[str], env: Mapping[str, str]) -> tuple[tuple[str, ...], str | None, Path]:
    return tuple(argv[:3]), env.get("PATH"), Path.cwd()


def _trains(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    source = _main_file(*_key(argv, env))
    return source is not None and _Module.read(source).trains()


@lru_cache(maxsize=8)
def _main_file(command: tuple[str, ...], path: str | None, folder: Path) -> Path | None:
    """The file that this interpreter would run; None for any other command."""
    own, found = Path(sys.executable), shutil.which(command[0], path=path)
    if found is None or len(command) < 2:
        return None
    interpreter = Path(found).absolute()
    if interpreter.parent != own.parent or interpreter.resolve() != own.resolve():  # a folder is an environment
        return None
    if command[1] == "-m" and len(command) > 2:
        target = folder.joinpath(*command[2].split("."))
        candidates = [target.with_suffix(".py"), target / "__main__.py"]
    else:
        candidates = [] if command[1].startswith("-") else [Path(command[1])]
    return next((each.absolute() for each in candidates if each.suffix == ".py" and each.is_file()), None)


@lru_cache(maxsize=8)
def _obstacle(command: tuple[str, ...], path: str | None, folder: Path) -> str | None:
    main = _main_file(command, path, folder)
    if main is None:
        return None
    is_module = command[1] == "-m"
    root = folder if is_module else main.resolve().parent
    left, seen = [main, *(_own_files(root, command[2]) if is_module else ())], set[Path]()
    while left:
        file = left.pop()
        if file in seen:
            continue
        seen.add(file)
        if len(seen) > _MOST_FILES:
            return f"it has more than {_MOST_FILES} modules of its own"
        module = _Module.read(file)
        if line := module.environment_change():
            return f"{file.name}, line {line}, may change environment variables"
        for name in module.imported(root):
            if name == _ABOVE:
                return f"{file.name} imports from above its folder"
            own, top = list(_own_files(root, name)), name.partition(".")[0]
            if top in _BY_NAME or not (own or top in _IMPORTED or top in sys.stdlib_module_names):
                return f"{file.name} imports {top}"
            left += own if top not in _IMPORTED else []
    return None


def _own_files(root: Path, name: str) -> Iterator[Path]:
    """The files that an import of a module of the program runs: those of its packages too."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        target = root.joinpath(*parts[:count])
        for file in (target.with_suffix(".py"), target / "__init__.py"):
            if file.is_file():
                yield file


class _Module:
    """A parsed source file.

    Args:
        file: the file.
        tree: its syntax; None if it cannot be parsed, which the interpreter then reports.
    """

    def __init__(self, file: Path, tree: ast.Module | None) -> None:
        self.file = file
        self.tree = tree

    @classmethod
    @lru_cache(maxsize=_MOST_FILES)
    def read(cls, file: Path) -> _Module:
        """Reads and parses a file."""
        try:
            return cls(file, ast.parse(file.read_bytes()))
        except (OSError, SyntaxError, ValueError):
            return cls(file, None)

    def imported(self, root: Path) -> Iterator[str]:
        """The full names of modules that the file imports; `root` is the folder that they are searched in first."""
        for node in ast.walk(self.tree) if self.tree else ():
            yield from self._names(node, root)

    def trains(self) -> bool:
        """Whether the file itself imports TensorFlow whenever it runs."""
        imports = (
            node for node in (self.tree.body if self.tree else ()) if isinstance(node, ast.Import | ast.ImportFrom)
        )
        names = (name for node in imports for name in self._names(node, self.file.parent))
        return any(name.partition(".")[0] in _TRAINS for name in names)

    def environment_change(self) -> int | None:
        """The first line that may change the environment."""
        for parent in ast.walk(self.tree) if self.tree else ():
            for node in ast.iter_child_nodes(parent):
                if not isinstance(node, ast.Attribute | ast.Name):
                    continue
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                if name in ("putenv", "unsetenv") or (name in ("environ", "environb") and not _reads(node, parent)):
                    return node.lineno
        return None

    def _names(self, node: ast.AST, root: Path) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = (
                Path(os.path.normpath(self.file.parent / Path(*[".."] * (node.level - 1)))) if node.level else root
            )
            if not package.is_relative_to(root):
                yield _ABOVE
                return
            base = package.relative_to(root).parts
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))


def _reads(node: ast.AST, parent: ast.AST) -> bool:
    if isinstance(parent, ast.Attribute):
        return parent.attr in _READING
    if isinstance(parent, ast.Subscript):
        return isinstance(parent.ctx, ast.Load)
    return isinstance(parent, ast.Compare) and node in parent.comparators
