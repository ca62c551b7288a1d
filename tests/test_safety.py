"""No module runs a shell, or reads YAML, pickles or text as code."""

import ast
from pathlib import Path

import pytest

from tests.support.sources import syntax_tree

PACKAGE = Path(__file__).parents[1] / "tfdist_cli"
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn"}
SHELLS |= {"asyncio.create_subprocess_shell", "commands.getoutput"}
CODE = {"eval", "exec", "compile", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "pickle.load"}
CODE |= {"pickle.loads", "marshal.loads", "__import__"}
RUN_PROGRAMS = {"launch/process/fork_server.py": ["compile", "exec", "exec"]}
"""The calls that run a user's program in a forked task: from its file, or as the module that it is."""


def broken_rules(tree):
    """The calls of a module that break the rules."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0]: alias.asname and alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        first, _, rest = ast.unparse(call.func).partition(".")
        name = ".".join(part for part in (names.get(first) or first, rest) if part)
        through_shell = any(keyword.arg == "shell" for keyword in call.keywords)
        if name in SHELLS | CODE or through_shell:
            yield name


def test_no_shell_and_no_code_from_data():
    found = {path: sorted(broken_rules(syntax_tree(path))) for path in PACKAGE.rglob("*.py")}
    assert {path.relative_to(PACKAGE).as_posix(): calls for path, calls in found.items() if calls} == RUN_PROGRAMS


@pytest.mark.parametrize(
    "source",
    [
        "import os; os.system('ls')",
        "from os import system as run; run('ls')",
        "import subprocess as s; s.run(['ls'], shell=True)",
        "import subprocess as s; s.getoutput('ls')",
        "import yaml; yaml.load(text, yaml.Loader)",
        "eval(text)",
    ],
)
def test_the_rules_are_noticed(source):
    assert list(broken_rules(ast.parse(source)))
