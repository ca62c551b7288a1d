"""Where a run comes from."""

import subprocess

from tfdist_cli.launch.provenance import provenance

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b.invalid")


def git(folder, *arguments):
    done = subprocess.run(["git", "-C", folder, *IDENTITY, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_and_whether_files_differ_from_it(tmp_path):
    git(tmp_path, "init", "-q")
    assert provenance(tmp_path)["commit"] is None
    (tmp_path / "a.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    found = provenance(tmp_path)
    assert (found["commit"], found["modified"]) == (git(tmp_path, "rev-parse", "HEAD"), False)
    (tmp_path / "a.py").write_text("2")
    assert provenance(tmp_path)["modified"] is True


def test_what_is_not_known_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance(tmp_path)["commit"] is provenance(tmp_path / "gone")["modified"] is None
    monkeypatch.setenv("PATH", "")
    assert provenance(tmp_path)["commit"] is None
    assert provenance(tmp_path)["python"].startswith("3.")
