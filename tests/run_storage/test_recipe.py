"""Recipes in storage services: their folder is fetched once, and a run keeps the content with which it has begun."""

import hashlib
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import InvalidValue
from tfdist_cli.run_storage import recipe as module
from tfdist_cli.run_storage.recipe import CONTENT, RecipeFetcher, recipe_of_copy
from tfdist_cli.spec import recipe_files
from tfdist_cli.spec.loading.dump import dump
from tfdist_cli.spec.loading.load import load_recipe, load_run
from tfdist_cli.spec.loading.problems import SpecError
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.storage.remote import RemoteFolder

FILES = {
    "digits.yaml": b"module: digits\ncheckpoint: {every_steps: 10, dir: kept}\n",
    "digits.py": b"def model(params): ...\n",
    "package/layers.py": b"UNITS = 8\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a recipe in a service, and an empty cache here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(CONTENT, raising=False)
    remote = RemoteFolder(Url(f"memory://{uuid.uuid4()}/recipes"))
    for name, content in FILES.items():
        remote.write(name, content)
    remote.write("__pycache__/digits.pyc", b"compiled")
    remote.write(".git/config", b"hidden")
    return remote


def content(name, recipe):
    """A file of the folder with the recipe's module."""
    return Path(recipe.module_dir, name).read_bytes()


@pytest.fixture
def cluster_file(tmp_path, folder):
    path = tmp_path / "cluster.yaml"
    roles = "{chief: {}, ps: {}, worker: {}}"
    path.write_text(f"strategy: parameter_server\nroles: {roles}\nrecipe: {folder.url}/digits.yaml\n")
    return path


def test_the_folder_of_the_file_is_fetched(folder, cluster_file, tmp_path):
    cluster, recipe = load_run(cluster_file, fetch=RecipeFetcher())
    assert cluster.recipe == Path(recipe.module_dir, "digits.yaml")
    assert {str(path.relative_to(recipe.module_dir)) for path in recipe.module_dir.rglob("*") if path.is_file()} == set(
        FILES
    )
    assert content("package/layers.py", recipe) == FILES["package/layers.py"]
    assert (recipe.source.address, recipe.source.sha256) == (folder.url / "digits.yaml", recipe.module_dir.name)
    assert recipe.checkpoint.dir == folder.url / "kept", "relative to the recipe's file"
    assert load_run(tmp_path / "cluster.yaml", folder.url / "digits.yaml", fetch=RecipeFetcher())[1] == recipe
    assert load_recipe(folder.url / "digits.yaml", fetch=RecipeFetcher()) == recipe


def test_the_content_is_what_sha256sum_prints(tmp_path):
    files = {**FILES, "ä b.txt": b"", "Z.py": b"1", "a.py": b"2"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    command = "LC_ALL=C find * -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"
    printed = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, check=True, text=True).stdout
    assert recipe_files.content_of(files) == printed.split()[0]
    assert recipe_files.content_of(recipe_files.read_files(tmp_path)) == printed.split()[0]


def test_a_recipe_of_a_run_loads_as_it_was(cluster_file, tmp_path):
    _, recipe = load_run(cluster_file, fetch=RecipeFetcher())
    (tmp_path / "recipe.yaml").write_text(dump(recipe))
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


def test_a_known_content_is_not_fetched(folder, cluster_file, monkeypatch):
    sha256 = load_run(cluster_file, fetch=RecipeFetcher())[1].source.sha256
    folder.write("digits.py", b"changed")
    pinned = ["recipe_sha256=" + sha256]
    cluster, recipe = load_run(cluster_file, None, pinned, fetch=RecipeFetcher())
    assert (recipe.source.sha256, cluster.recipe_sha256) == (sha256, None)
    assert content("digits.py", recipe) == FILES["digits.py"]
    monkeypatch.setenv(CONTENT, sha256)
    assert load_run(cluster_file, fetch=RecipeFetcher())[1] == recipe, "the program that a task becomes"
    monkeypatch.delenv(CONTENT)
    assert load_run(cluster_file, fetch=RecipeFetcher())[1].source.sha256 != sha256


def test_another_content_than_the_file_says(cluster_file):
    other = hashlib.sha256().hexdigest()
    with raises(SpecError, "recipe-changed"):
        load_run(cluster_file, None, [f"recipe_sha256={other}"], fetch=RecipeFetcher())
    with raises(SpecError, "invalid-value"):
        load_run(cluster_file, None, ["recipe_sha256=abc"], fetch=RecipeFetcher())


def test_a_sha256_of_a_local_recipe(cluster_file, tmp_path):
    (tmp_path / "here.yaml").write_text("module: here\n")
    with raises(SpecError, "recipe-not-in-bucket"):
        load_run(cluster_file, tmp_path / "here.yaml", ["recipe_sha256=" + "a" * 64], fetch=RecipeFetcher())


def test_a_folder_that_was_changed_here_is_fetched_again(cluster_file):
    _, recipe = load_run(cluster_file, fetch=RecipeFetcher())
    Path(recipe.module_dir, "digits.py").write_bytes(b"changed")
    Path(recipe.module_dir, "__pycache__").mkdir()
    again = load_run(cluster_file, None, [f"recipe_sha256={recipe.source.sha256}"], fetch=RecipeFetcher())[1]
    assert content("digits.py", again) == FILES["digits.py"]


def begun(folder, cluster_file, run):
    """A run that has begun with the recipe. Returns its content."""
    _, recipe = load_run(cluster_file, fetch=RecipeFetcher())
    run.mkdir()
    (run / "recipe.yaml").write_text(dump(recipe))
    recipe_files.copy_to_run(recipe.source.sha256, run)
    return recipe.source.sha256


@pytest.mark.parametrize("stored", [False, True], ids=["directory", "address"])
def test_a_run_uses_the_content_with_which_it_has_begun(stored, folder, cluster_file, tmp_path):
    """Also on a machine that has nothing but the run, and if the service has another content by then."""
    run = tmp_path / "run"
    sha256 = begun(folder, cluster_file, run)
    at = run
    if stored:
        at = Url(f"memory://{uuid.uuid4()}/run")
        for path in run.rglob("*.*"):
            RemoteFolder(at).write(str(path.relative_to(run)), path.read_bytes())
    same = RecipeFetcher(at)
    assert load_run(cluster_file, fetch=same)[1].source.sha256 == sha256
    assert same.warnings == []
    folder.write("digits.py", b"changed")
    shutil.rmtree(tmp_path / "cache")
    fetcher = RecipeFetcher(at)
    _, recipe = load_run(cluster_file, fetch=fetcher)
    assert recipe.source.sha256 == sha256
    assert content("digits.py", recipe) == FILES["digits.py"]
    [warning] = fetcher.warnings
    assert warning.code == "recipe-changed"
    assert sha256[:12] in warning.message
    folder.delete(FILES)
    gone = RecipeFetcher(at)
    assert load_run(cluster_file, fetch=gone)[1].source.sha256 == sha256, "the run needs the service for nothing else"
    assert gone.warnings == []


def test_a_run_without_its_files_is_not_continued_with_others(folder, cluster_file, tmp_path):
    begun(folder, cluster_file, tmp_path / "run")
    folder.write("digits.py", b"changed")
    shutil.rmtree(tmp_path / "cache")
    shutil.rmtree(tmp_path / "run" / "recipe")
    with raises(SpecError, "recipe-changed"):
        load_run(cluster_file, fetch=RecipeFetcher(tmp_path / "run"))


def test_a_content_that_is_named_counts_more_than_the_run(folder, cluster_file, tmp_path):
    begun(folder, cluster_file, tmp_path / "run")
    folder.write("digits.py", b"changed")
    new = load_run(cluster_file, fetch=RecipeFetcher())[1].source.sha256
    fetcher = RecipeFetcher(tmp_path / "run")
    assert load_run(cluster_file, None, [f"recipe_sha256={new}"], fetch=fetcher)[1].source.sha256 == new
    assert [warning.code for warning in fetcher.warnings] == ["recipe-changed"]


def test_a_command_finds_the_module_in_the_copy_of_a_run(folder, cluster_file, tmp_path):
    begun(folder, cluster_file, tmp_path / "run")
    shutil.rmtree(tmp_path / "cache")
    recipe = recipe_of_copy(load_recipe(tmp_path / "run" / "recipe.yaml"), tmp_path / "run")
    assert content("digits.py", recipe) == FILES["digits.py"]


@pytest.mark.parametrize("limit", ["MOST_BYTES", "MOST_FILES"])
def test_a_folder_with_more_than_a_recipe(limit, cluster_file, monkeypatch):
    monkeypatch.setattr(module, limit, 2)
    with raises(SpecError, "recipe-too-large"):
        load_run(cluster_file, fetch=RecipeFetcher())


def test_what_is_not_there(folder, cluster_file):
    with raises(SpecError, "no-such-file") as error:
        load_run(cluster_file, folder.url / "digit.yaml", fetch=RecipeFetcher())
    assert "digits.yaml" in str(error.value)
    with raises(SpecError, "no-such-file"):
        load_run(cluster_file, folder.url / "x" / "digits.yaml", fetch=RecipeFetcher())
    with raises(InvalidValue, "no-such-file"):
        RecipeFetcher()(Url(f"memory://{uuid.uuid4()}"), None)


def test_no_rights(cluster_file, folder, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "denied")

    monkeypatch.setattr(type(folder._files), "find", denied)
    with raises(SpecError, "storage-unreachable") as error:
        load_run(cluster_file, fetch=RecipeFetcher())
    assert f"{cluster_file}:3:" in str(error.value), "the line that names it"


def test_a_cache_that_cannot_be_written(cluster_file, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with raises(SpecError, "cache-not-writable"):
        load_run(cluster_file, fetch=RecipeFetcher())


def test_where_no_recipe_is_fetched(cluster_file):
    with raises(SpecError, "unsupported-scheme"):
        load_run(cluster_file)
