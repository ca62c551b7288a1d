"""Where a run comes from."""

import subprocess

from tfdist_cli.launch.provenance import provenance
from tfdist_cli.spec.sections.recipe import Recipe

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b.invalid")


def git(folder, *arguments):
    done = subprocess.run(["git", "-C", folder, *IDENTITY, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def of(folder):
    return provenance(Recipe.model_validate({"module": "digits", "module_dir": folder}))


def test_the_commit_and_whether_files_differ_from_it(tmp_path):
    git(tmp_path, "init", "-q")
    assert of(tmp_path)["commit"] is None
    (tmp_path / "a.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    found = of(tmp_path)
    assert (found["commit"], found["modified"]) == (git(tmp_path, "rev-parse", "HEAD"), False)
    (tmp_path / "a.py").write_text("2")
    assert of(tmp_path)["modified"] is True


def test_what_is_not_known_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert of(tmp_path)["commit"] is of(tmp_path / "gone")["modified"] is None
    monkeypatch.setenv("PATH", "")
    assert of(tmp_path)["commit"] is None
    assert of(tmp_path)["python"].startswith("3.")


def test_a_recipe_of_a_storage_service():
    source = {"address": "s3://bucket/recipes/digits.yaml", "sha256": "a" * 64}
    found = provenance(Recipe.model_validate({"module": "digits", "source": source}))
    assert (found["recipe"], found["recipe_sha256"]) == (source["address"], source["sha256"])
    assert "recipe" not in provenance(None)
