"""Every command of the benchmarks starts."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = [path for path in ROOT.glob("benchmarks/**/*.py") if '__name__ == "__main__"' in path.read_text("utf-8")]
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in MODULES
    if path.parent.name != "programs"
)


@pytest.mark.parametrize("command", COMMANDS)
def test_it_explains_itself(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    with pytest.raises(SystemExit) as exited:
        runpy.run_module(command, run_name="__main__", alter_sys=True)
    assert exited.value.code == 0
    assert "usage:" in capsys.readouterr().out
