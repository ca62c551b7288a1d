"""The `ssh` command, and how the shell on a host runs it."""

import subprocess
import sys

import pytest

from tfdist_cli.launch.ssh.command import NO_PYTHON, python_command, ssh_argv
from tfdist_cli.spec.sections.ssh import HostSpec

PRINT = ("-c", "import sys; print(sys.argv[1:])")


def run(command, **env):
    return subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True, check=False)


def test_options_of_the_user_and_of_tfdist(make_cluster, tmp_path):
    cluster = make_cluster("single", ssh={"config": str(tmp_path / "a b")}, chief=1)
    argv = ssh_argv(cluster, HostSpec(address="h1", port=2224, user="me"), "true")
    assert argv[:3] == ["ssh", "-F", str(tmp_path / "a b")]
    assert "BatchMode=yes" in argv
    assert argv[-7:] == ["-p", "2224", "-l", "me", "--", "h1", "true"]
    assert "-F" not in ssh_argv(make_cluster("single", chief=1), HostSpec(address="h1"), "true")


@pytest.mark.parametrize("word", ["a'; echo foo", "ü", "", " two words ", "$HOME `id`", "line\nfeed", "x" * 250, "!!"])
def test_words_reach_python_unchanged(word):
    host = HostSpec(address="h1", python=sys.executable)
    assert run(python_command(host, (*PRINT, word))).stdout == f"{[word]}\n"


@pytest.mark.parametrize("folder", ["a'; echo foo", "ü b", "$HOME"])
def test_pythons_with_any_path(tmp_path, folder):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / folder / "python").chmod(0o755)
    for python in (f"{tmp_path}/{folder}/python", f"~/{folder}/python"):
        host = HostSpec(address="h1", python=python)
        assert run(python_command(host, (*PRINT, "x")), HOME=str(tmp_path), PATH="/bin:/usr/bin").stdout == "['x']\n"


def test_a_python_without_tfdist_is_not_used(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    done = run(python_command(HostSpec(address="h1", python=str(python)), PRINT), PATH="/bin:/usr/bin")
    assert (done.returncode, done.stdout, done.stderr) == (NO_PYTHON, "", "")


def test_python3_is_the_fallback(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    real = tmp_path / "python3"
    real.write_text("#!/bin/sh\ncase $2 in *find_spec*) exit 0;; esac\necho found\n")
    real.chmod(0o755)
    assert run(python_command(HostSpec(address="h1"), PRINT), PATH=f"{tmp_path}:/bin:/usr/bin").stdout == "found\n"
