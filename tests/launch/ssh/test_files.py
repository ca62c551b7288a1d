"""Copying files to hosts."""

import os
import shutil
import socket
import subprocess

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.ssh.files import (
    FileList,
    IncomingFile,
    common_folder,
    lacking,
    list_files,
    pieces,
    remove_former,
)

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
HOSTILE = ["a'; echo foo", "ü ß", " x ", "line\nfeed", "-rf", "n" * 100, "$(id)"]


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def paths(roots, *exclude):
    return [entry.path for entry in list_files(roots, exclude)]


def git(folder, *arguments):
    own = ("-c", "user.name=x", "-c", "user.email=x", "-c", "protocol.file.allow=always")
    subprocess.run(["git", "-C", folder, *own, *arguments], check=True, capture_output=True)


def copy(roots, to, *exclude):
    """Copies as launcher and agent do, and returns the paths of the files that were sent."""
    entries = list_files(roots, exclude)
    remove_former(to, FileList(f"here:{roots[0]}", tuple(entries)))
    sent = lacking(to, entries)
    for index in sent:
        incoming = IncomingFile(to, entries[index])
        for data, last in pieces(common_folder(roots) / entries[index].path):
            incoming.add(data, last=last)
    return [entries[index].path for index in sent]


def below(folder):
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return found - {".tfdist-files.json"}


def test_folders_keep_their_relative_paths(tmp_path):
    write(tmp_path, "project/recipes/r.py", "project/data/x.csv", "project/other.py", "project/one.py")
    project = tmp_path / "project"
    roots = [project / "recipes", project / "data", project / "one.py"]
    assert paths(roots) == ["data/x.csv", "one.py", "recipes/r.py"]
    assert paths([project]) == [
        "project/data/x.csv",
        "project/one.py",
        "project/other.py",
        "project/recipes/r.py",
    ]


def test_excluded_files_and_run_directories_are_not_copied(tmp_path):
    write(tmp_path, "p/a.py", "p/a.ckpt", "p/raw/b", "p/raw/deep/c", "p/__pycache__/a.pyc", "p/runs/x/launcher.lock")
    write(tmp_path, "p/runs/x/checkpoints/step-1/state.json", "p/data/raw/d")
    assert paths([tmp_path / "p"], "*.ckpt", "raw") == ["p/a.py"]
    assert paths([tmp_path / "p"], "raw/*") == ["p/a.ckpt", "p/a.py", "p/data/raw/d"]
    assert paths([tmp_path / "p" / "a.py"], "a.*") == []


@pytest.mark.parametrize("pattern", ["raw", "raw/", "./raw", "./raw/"])
def test_spellings_of_an_excluded_folder(tmp_path, pattern):
    project = write(tmp_path / "raw", "a.py", "raw/b", "raw/deep/c")
    assert paths([project], pattern) == ["raw/a.py"], "the root itself is not excluded"


@needs_git
def test_files_that_git_ignores_are_not_copied(tmp_path):
    project = write(tmp_path / "p", ".gitignore", "a.py", "kept/b.py", "out/c.bin", "data/d.csv", "new.py", *HOSTILE)
    (project / ".gitignore").write_text("out/\ndata/\n")
    git(project, "init")
    git(project, "add", "a.py")
    (project / "a.py").unlink()
    expected = sorted(f"p/{name}" for name in (".gitignore", "kept/b.py", "new.py", *HOSTILE))
    assert paths([project]) == expected
    assert paths([project / "kept"]) == ["kept/b.py"]
    assert paths([project / "data"]) == ["data/d.csv"], "a root is copied although git ignores it"


def test_only_changed_files_are_sent_and_deleted_ones_are_removed(tmp_path):
    project, to = write(tmp_path / "p", "a.py", "b/c.py", *HOSTILE), tmp_path / "host"
    assert len(copy([project], to)) == 2 + len(HOSTILE)
    assert below(to) == {f"p/{name}" for name in ("a.py", "b/c.py", *HOSTILE)}
    assert copy([project], to) == []
    (project / "a.py").write_text("longer than before")
    os.utime(project / "b/c.py", ns=(1, 1_700_000_000_123_456_789))
    assert copy([project], to) == ["p/a.py", "p/b/c.py"]
    assert (to / "p/a.py").read_text() == "longer than before"
    (to / "p/made-there").write_text("")
    for name in HOSTILE:
        (project / name).unlink()
    assert copy([project], to) == []
    assert below(to) == {"p/a.py", "p/b/c.py", "p/made-there"}


def test_a_file_keeps_its_content_and_its_permissions(tmp_path):
    content = os.urandom(2 * 1024 * 1024 + 17)
    write(tmp_path / "p", "empty", "run.sh")
    (tmp_path / "p/empty").write_bytes(b"")
    (tmp_path / "p/run.sh").write_bytes(content)
    copy([tmp_path / "p"], tmp_path / "host")
    (tmp_path / "p/run.sh").chmod(0o751)
    copy([tmp_path / "p"], tmp_path / "host")
    copied = tmp_path / "host" / "p" / "run.sh"
    assert copied.read_bytes() == content
    assert copied.stat().st_mode & 0o777 == 0o751
    assert (tmp_path / "host/p/empty").read_bytes() == b""
    assert [len(data) for data, _ in pieces(copied)] == [1024 * 1024, 1024 * 1024, 17]


def test_missing_files_are_skipped(tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "broken").symlink_to("nowhere")
    assert paths([tmp_path / "p", tmp_path / "gone"]) == []


@needs_git
def test_submodules_and_nested_repositories_are_copied_without_ignored_files(tmp_path):
    library = write(tmp_path / "library", "lib.py")
    project = write(tmp_path / "p", "a.py")
    for folder in (library, project):
        git(folder, "init")
    git(library, "add", ".")
    git(library, "commit", "-m", "x")
    git(project, "submodule", "add", str(library), "vendor")
    git(project, "clone", str(library), "nested")
    for name in ("vendor", "nested"):
        write(project / name, "new.py", "out")
        (project / name / ".gitignore").write_text("out\n")
    expected = [".gitignore", "lib.py", "new.py"]
    assert paths([project], ".gitmodules") == [
        "p/a.py",
        *(f"p/nested/{name}" for name in expected),
        *(f"p/vendor/{name}" for name in expected),
    ]
    assert paths([project], ".gitmodules", "vendor", "nested") == ["p/a.py"]


@needs_git
@pytest.mark.parametrize("tracked", [False, True])
def test_linked_folders_are_copied_unless_they_contain_the_link(tmp_path, tracked):
    project = write(tmp_path / "p", "a.py", "pkg/b.py")
    write(tmp_path / "data", "d.csv", "deep/e.csv")
    (project / "data").symlink_to(tmp_path / "data")
    (project / "d.csv").symlink_to(tmp_path / "data/d.csv")
    for name, target in (("pkg/all", project), ("pkg/self", project / "pkg"), ("root", "/"), ("loop", "loop")):
        (project / name).symlink_to(target)
    (tmp_path / "data/back").symlink_to(project)
    if tracked:
        git(project, "init")
    linked = ["p/data/d.csv", "p/data/deep/e.csv"]
    assert paths([project]) == ["p/a.py", "p/d.csv", *linked, "p/pkg/b.py"]
    assert paths([project], "data") == ["p/a.py", "p/d.csv", "p/pkg/b.py"]
    assert paths([project / "data"], "back") == ["data/d.csv", "data/deep/e.csv"]


@needs_git
def test_a_failure_of_git_is_an_error_because_ignored_files_would_be_copied(tmp_path):
    project = write(tmp_path / "it's", "a.py", "venv/big")
    git(project, "init")
    (project / ".git" / "index").write_text("damaged")
    with raises(UsageError, "git-failed") as caught:
        paths([project])
    assert "index file" in caught.value.message
    assert "it's" in caught.value.message


def test_a_folder_becomes_a_file_and_a_file_a_folder(tmp_path):
    project, to = write(tmp_path / "p", "conf/deep/a.py", "conf/b.py", "file", "kept/c.py"), tmp_path / "host"
    copy([project], to)
    write(
        to / "p", "conf/__pycache__/b.pyc", "conf/deep/__pycache__/a.pyc", "kept/__pycache__/c.pyc", "kept/made-there"
    )
    shutil.rmtree(project / "conf")
    shutil.rmtree(project / "kept")
    (project / "file").unlink()
    write(project, "conf", "file/d.py")
    assert copy([project], to) == ["p/conf", "p/file/d.py"]
    assert below(to) == {"p/conf", "p/file/d.py", "p/kept/made-there", "p/kept/__pycache__/c.pyc"}
    shutil.rmtree(project / "file")
    copy([project], to)
    assert not (to / "p/file").exists(), "Python would import an empty folder as a package"


def test_two_projects_do_not_share_a_folder(tmp_path):
    one, other, to = write(tmp_path / "one", "a.py"), write(tmp_path / "other", "b.py"), tmp_path / "host"
    copy([one], to)
    with raises(UsageError, "folder-has-other-files") as caught:
        copy([other], to)
    assert all(f"here:{folder}" in caught.value.message for folder in (one, other))
    assert below(to) == {"one/a.py"}
    assert copy([one, other], to) == ["other/b.py"], "further roots may be added"


def test_incomplete_files_are_removed(tmp_path):
    project, to = write(tmp_path / "p", "deep/a.py"), tmp_path / "host"
    copy([project], to)
    incoming = IncomingFile(to, list_files([project], ())[0])
    incoming.add(b"part", last=False)
    incoming.drop()
    assert below(to) == {"p/deep/a.py"}
    ended = subprocess.Popen(["true"])
    ended.wait()
    killed, alive, elsewhere = (
        f".{name}.tfdist-new" for name in (f"{socket.gethostname()}-{ended.pid}", f"{socket.gethostname()}-1", "h-1")
    )
    for name in (killed, alive, elsewhere):
        (to / "p/deep" / name).touch()
    copy([project], to)
    assert below(to) == {"p/deep/a.py", f"p/deep/{alive}", f"p/deep/{elsewhere}"}
