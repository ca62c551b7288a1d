"""Running `tfdist` in this process."""

import signal
from dataclasses import dataclass

import pytest

from tests.support.ports import GIVEN_PORT
from tfdist_cli.__main__ import main
from tfdist_cli.cli.console import console


@dataclass
class Result:
    """What a command came to."""

    code: int
    out: str
    err: str


@pytest.fixture
def tfdist(monkeypatch, capsys):
    """Runs `tfdist` with arguments."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["tfdist", *map(str, arguments)])
        console._console.cache_clear()  # it has read the environment of an earlier test
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(SystemExit) as end:
            main()
        signal.signal(signal.SIGINT, before)
        return Result(int(end.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def cluster_file(tmp_path, monkeypatch):
    """A cluster file in the current folder, and a recipe with its module beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.yaml").write_text("module: digits\n")
    (tmp_path / "digits.py").write_text("raise RuntimeError('imported')\n")
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "strategy: parameter_server\n"
        f"roles:\n  chief: {{}}\n  ps: {{hosts: ['127.0.0.1:{GIVEN_PORT}']}}\n  worker: {{replicas: 2}}\n"
    )
    return path
