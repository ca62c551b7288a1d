"""Imports run downwards, TensorFlow stays where training is, and only `cli` speaks to the terminal."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tfdist_cli"
BELOW = {
    "errors": set(),
    "run_files": set(),
    "records": {"run_files"},
    "masking": set(),
    "liveness_probe": set(),
    "heartbeat": {"records", "liveness_probe"},
    "spec": {"errors"},
    "tf_config": {"spec"},
    "resources": {"errors", "spec"},
    "cautions": {"errors", "spec", "resources"},
    "doctor": {"errors", "spec", "launch"},
    "phases": set(),
    "requirements": {"errors"},
    "slurm": {"errors", "spec"},
    "environment": {"errors", "run_files", "spec", "phases"},
    "task_environment": {"records", "masking", "spec", "resources", "tf_config", "environment"},
    "plan": {"errors", "spec", "resources", "task_environment"},
    "launch": {
        "errors",
        "run_files",
        "records",
        "masking",
        "spec",
        "resources",
        "tf_config",
        "environment",
        "task_environment",
        "plan",
        "requirements",
    },
    "datasets": {"errors"},
    "bench": {"errors", "spec", "resources", "phases"},
    "train": {"errors", "run_files", "records", "masking", "heartbeat", "spec", "environment", "phases"},
    "task": {"errors", "run_files", "records", "masking", "spec", "environment", "train"},
    "cli": {
        "errors",
        "run_files",
        "records",
        "masking",
        "spec",
        "resources",
        "tf_config",
        "environment",
        "plan",
        "cautions",
        "doctor",
        "requirements",
        "slurm",
        "launch",
        "bench",
        "task",
    },
    "__init__": {"environment", "errors", "requirements", "spec", "train"},
    "__main__": {"cli"},
}
"""What each part of the house may import."""
TRAINS = {"train", "task"}
"""The parts that may import TensorFlow."""
PIPELINES = {PACKAGE / "datasets" / "criteo.py"}
"""Data sets too large to be arrays: they are `tf.data`, and only recipes import them."""
PROGRAMS = {PACKAGE / "task" / "health.py", PACKAGE / "datasets" / "click_generator.py"}
"""Modules that are programs of their own, with something to print."""


def modules() -> Iterator[tuple[str, Path]]:
    """Every module, with the part of the house it belongs to."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path


def imports(path: Path) -> Iterator[str]:
    """The full names of what a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports name modules in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def each_module(test):
    return pytest.mark.parametrize(
        ("part", "path"), [pytest.param(*both, id=str(both[1].relative_to(PACKAGE))) for both in modules()]
    )(test)


@each_module
def test_imports_run_downwards(part, path):
    own = {name.split(".")[1] for name in imports(path) if name.startswith("tfdist_cli.")}
    assert own <= BELOW[part] | {part}, f"{part} stands below {own - BELOW[part] - {part}}"


@each_module
def test_only_training_imports_tensorflow(part, path):
    if part not in TRAINS and path not in PIPELINES:
        assert not {name for name in imports(path) if name.split(".")[0] in ("tensorflow", "keras")}


@each_module
def test_only_cli_prints(part, path):
    if part == "cli" or path in PROGRAMS:
        return
    assert "print" not in {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
    assert not {name for name in imports(path) if name.split(".")[0] in ("rich", "typer")}


@each_module
def test_modules_and_functions_have_a_size(part, path):
    text = path.read_text()
    assert text.count("\n") <= 480
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert lines <= 45, f"{node.name} has {lines} lines"


IMPORTED_BY = """
import sys
from tfdist_cli.cli.app import main
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
