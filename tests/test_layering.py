"""Imports run downwards, only training imports TensorFlow, and only `cli` writes to the terminal."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.sources import syntax_tree
from tfdist_cli.spec.roles import ROLES
from tfdist_cli.spec.strategies import STRATEGIES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tfdist_cli"
PARTS: dict[str, set[str]] = {
    "errors": set(),
    "finding": set(),
    "spec": {"errors"},
    "protocol": {"errors", "finding", "spec"},
    "plan": {"errors", "protocol", "spec"},
    "storage": {"errors", "spec"},
    "requirements": {"errors", "spec"},
    "launch": {"errors", "plan", "protocol", "requirements", "spec"},
    "run_storage": {"errors", "launch", "plan", "protocol", "spec", "storage"},
    "runs": {"errors", "launch", "protocol", "run_storage", "spec"},
    "doctor": {"errors", "finding", "launch", "spec"},
    "check": {"errors", "finding", "launch", "protocol", "requirements", "spec"},
    "tracking": {"protocol"},
    "profiling": set(),
    "report": {"launch", "plan", "protocol"},
    "datasets": {"errors", "spec", "storage", "train"},
    "bench": {"errors", "plan", "protocol", "spec"},
    "tables": {"errors", "spec", "storage"},
    "train": {"errors", "protocol", "spec", "storage", "tables"},
    "task": {"errors", "finding", "protocol", "spec", "storage", "train"},
    "init": {"errors", "spec"},
    "cli": {
        *("bench", "check", "doctor", "errors", "finding", "init"),
        *("launch", "plan", "profiling", "protocol", "report", "requirements", "run_storage", "runs"),
        *("spec", "storage", "task"),
    },
    "integrations": {"errors", "launch", "runs", "spec", "storage", "task"},
    "__init__": {"errors", "integrations", "launch", "protocol", "requirements", "runs", "spec", "tables", "train"},
    "__main__": {"cli", "errors"},
}
"""What each part of the package may import beside itself."""
INSIDE: dict[str, dict[str, set[str]]] = {
    "spec": {
        "address": set(),
        "export_formats": set(),
        "roles": set(),
        "strategies": {"roles"},
        "task_id": {"roles"},
        "trackers": set(),
        "path_scheme": set(),
        "recipe_files": set(),
        "launchers": set(),
        "sections": {
            *("address", "export_formats", "launchers", "path_scheme", "roles"),
            *("strategies", "task_id", "trackers"),
        },
        "loading": {"path_scheme", "roles", "sections", "strategies"},
        "schema": {"sections"},
    },
    "launch": {
        "addresses": set(),
        "documents": set(),
        "object_names": set(),
        "provenance": set(),
        "restart_rules": set(),
        "supervisor": set(),
        "tracking": set(),
        "usage": {"documents", "supervisor"},
        "process": {"supervisor"},
        "run": {"documents", "provenance", "supervisor", "tracking", "usage"},
        "local": {"process", "supervisor"},
        "ssh": {"local", "process", "run", "supervisor"},
        "slurm": {"addresses", "process", "run", "supervisor"},
        "compose": {"addresses", "documents", "object_names", "process", "run", "supervisor"},
        "kubernetes": {"addresses", "documents", "object_names", "process", "restart_rules", "run", "supervisor"},
        "slots": {"addresses", "local", "ssh", "supervisor"},
        "spark": {"slots"},
        "ray": {"slots"},
        "registry": {"supervisor"},
        "manual": {"documents", "provenance", "run"},
        "stopping": {"manual", "registry", "run"},
    },
    "train": {
        "tf_compat": set(),
        "data": {"tf_compat"},
        "variables": {"tf_compat"},
        "layers": {"optimizers", "tf_compat", "variables"},
        "optimizers": {"tf_compat", "variables"},
        "cluster": {"data", "tf_compat", "variables"},
        "model": {"data", "layers", "optimizers", "tf_compat", "variables"},
        "engine": {"cluster", "data", "layers", "model", "optimizers", "tf_compat", "variables"},
        "checkpoint": {"layers", "model", "optimizers", "tf_compat", "variables"},
        "trainer": {
            *("checkpoint", "cluster", "data", "engine", "layers", "model", "optimizers", "tf_compat", "variables"),
        },
        "prediction": {"cluster", "data", "engine", "model", "tf_compat", "trainer", "variables"},
    },
}
"""What each folder of a part may import beside itself, within the part."""
MOST_MODULES = 12
LISTS = {"cli"}
"""Folders that are a plain list: one module for each command."""
TRAINS = {"train", "task"}
"""The parts that may import TensorFlow."""
PIPELINES = {Path("datasets", "criteo.py")}
"""Data sets too large to be arrays: they are `tf.data`, and only recipes import them."""
PROGRAMS = {Path("task", "health.py"), Path("datasets", "click_generator.py")}
"""Modules that are programs of their own, with something to print."""


@pytest.fixture(scope="module")
def modules() -> dict[Path, ast.Module]:
    """The syntax tree of every module, by its path in the package."""
    return {path.relative_to(PACKAGE): syntax_tree(path) for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.fixture(scope="module")
def imports(modules) -> dict[Path, set[str]]:
    """The full names of what each module imports, anywhere in it."""
    return {path: set(imported(path, tree)) for path, tree in modules.items()}


def imported(path: Path, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports name modules in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(path: Path) -> str:
    """The part of the package that a module belongs to."""
    return path.parts[0].removesuffix(".py")


def folder_of(part: str, module: list[str]) -> str:
    """The folder, or the module, of a part that a module belongs to: `["train", "engine", "base"]` → "engine"."""
    return module[1] if module[:1] == [part] and len(module) > 1 else ""


def only_those(found: dict[Path, Any]) -> dict[Path, Any]:
    """The modules in which something was found."""
    return {path: what for path, what in found.items() if what}


def test_imports_run_downwards(imports):
    def upward(path: Path) -> set[str]:
        part = part_of(path)
        return {name.split(".")[1] for name in imports[path] if name.startswith("tfdist_cli.")} - PARTS[part] - {part}

    assert not only_those({path: upward(path) for path in imports})


def test_imports_inside_a_part_run_downwards(imports):
    def upward(path: Path) -> set[str]:
        part = part_of(path)
        folder = folder_of(part, list(path.with_suffix("").parts))
        if part not in INSIDE or folder in ("", "__init__"):
            return set()
        names = [name.split(".")[1:] for name in imports[path] if name.startswith(f"tfdist_cli.{part}.")]
        return {folder_of(part, name) for name in names} - {folder} - INSIDE[part][folder]

    assert not only_those({path: upward(path) for path in imports})


@pytest.mark.parametrize("allowed", [PARTS, *INSIDE.values()], ids=["parts", *INSIDE])
def test_no_import_is_allowed_both_ways(allowed):
    above: dict[str, set[str]] = {name: set(below) for name, below in allowed.items()}
    while ready := [name for name, below in above.items() if not below]:
        for name in ready:
            del above[name]
        for below in above.values():
            below.difference_update(ready)
    assert not above, "these import each other"


@pytest.mark.parametrize("part", INSIDE)
def test_every_folder_says_what_it_imports(part):
    found = {path.stem for path in (PACKAGE / part).iterdir() if path.stem not in ("__init__", "__pycache__")}
    assert found == set(INSIDE[part])


def test_folders_have_few_modules(modules):
    counts = Counter(path.parent for path in modules if path.stem not in ("__init__", "__main__"))
    assert not {name: count for name, count in counts.items() if count > MOST_MODULES and str(name) not in LISTS}


def test_only_training_imports_tensorflow(imports):
    others = {path: names for path, names in imports.items() if part_of(path) not in TRAINS and path not in PIPELINES}
    assert not only_those({path: libraries(names, "tensorflow", "keras") for path, names in others.items()})


def libraries(names: set[str], *those: str) -> set[str]:
    """The imported names that belong to some libraries."""
    return {name for name in names if name.split(".")[0] in those}


def test_only_cli_prints(modules, imports):
    def prints(path: Path) -> set[str]:
        names = {node.id for node in ast.walk(modules[path]) if isinstance(node, ast.Name)}
        return names & {"print"} | libraries(imports[path], "rich", "typer")

    others = [path for path in modules if part_of(path) != "cli" and path not in PROGRAMS]
    assert not only_those({path: prints(path) for path in others})


def test_functions_are_short(modules):
    def long_ones(tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
                if lines > 45:
                    yield f"{node.name} has {lines} lines"

    assert not only_those({path: list(long_ones(tree)) for path, tree in modules.items()})


IMPORTED_BY = """
import sys
from tfdist_cli.__main__ import main
for arguments in {commands!r}:
    sys.argv = ["tfdist", *arguments.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (arguments, end.code)
print(*sorted(sys.modules), file=sys.stderr)
"""


def imported_by(folder, *commands):
    """The modules that some commands import."""
    (folder / "c.yaml").write_text("strategy: single\nroles: {chief: {}}\n")
    script = IMPORTED_BY.format(commands=commands)
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return set(run.stderr.split())


def test_no_command_but_training_imports_tensorflow(tmp_path):
    commands = ["--help", "--version", "validate c.yaml", "plan c.yaml", "plan c.yaml --json", "schema recipe"]
    commands += ["tf-config c.yaml --task chief", "launch --help", "role --help", "export --help", "bench --help"]
    commands += ["launch c.yaml --dry-run -- true", "doctor c.yaml --quick"]
    assert not {"tensorflow", "keras", "numpy"} & imported_by(tmp_path, *commands)


def test_plain_commands_start_without_rich_and_asyncio(tmp_path):
    imported = imported_by(tmp_path, "validate c.yaml", "tf-config c.yaml --task chief", "schema cluster")
    assert not {"rich.console", "asyncio", "psutil"} & imported


TABLES = {Path("spec", "roles.py"), Path("spec", "strategies.py")}
"""The modules that may ask what a role or a strategy is called: all others ask for its traits."""
NAMES = {*ROLES, *STRATEGIES}


def compared_names(tree: ast.Module) -> Iterator[str]:
    """The names of roles and strategies that code compares a value with, or keeps a collection of to do so."""
    for node in ast.walk(tree):
        compared: list[ast.expr | ast.pattern] = []
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.match_case):
            compared = [node.pattern]
        elif isinstance(node, ast.Tuple | ast.List | ast.Set) and len(node.elts) > 1:
            names = [each.value for each in node.elts if isinstance(each, ast.Constant) and each.value in NAMES]
            compared = [node] if len(names) == len(node.elts) else []
        for part in compared:
            values = (each.value for each in ast.walk(part) if isinstance(each, ast.Constant))
            yield from (value for value in values if value in NAMES)


def test_only_the_tables_compare_names_of_roles_and_strategies(modules):
    others = {path: tree for path, tree in modules.items() if path not in TABLES}
    found = only_those({path: list(compared_names(tree)) for path, tree in others.items()})
    assert not found, "use the traits of tfdist_cli.spec.roles and strategies"


@pytest.mark.parametrize(
    "source",
    [
        "task.role == 'evaluator'",
        "strategy not in ('single', 'mirrored')",
        "SERVING = ('ps', 'worker')",
        "task == TaskId('chief')",
        "match role:\n case 'ps': pass",
    ],
)
def test_compared_names_are_noticed(source):
    assert list(compared_names(ast.parse(source)))
