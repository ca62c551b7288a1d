"""What is copied to hosts."""

import os
import shutil
import subprocess

import pytest

from tfdist_cli.launch.ssh.files import Incoming, common_folder, lacking, list_files, pieces, remove_former

HOSTILE = ["a'; echo foo", "ü ß", " x ", "line\nfeed", "-rf", "n" * 100, "$(id)"]


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def paths(roots, *exclude):
    return [entry.path for entry in list_files(roots, exclude)]


def copy(roots, to, *exclude):
    """Copies as launcher and agent do, and gives what was sent."""
    entries = list_files(roots, exclude)
    remove_former(to, entries)
    sent = lacking(to, entries)
    for index in sent:
        incoming = Incoming(to, entries[index])
        for data, last in pieces(common_folder(roots) / entries[index].path):
            incoming.add(data, last=last)
    return [entries[index].path for index in sent]


def below(folder):
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return found - {".tfdist-files.json"}


def test_folders_keep_their_places_to_one_another(tmp_path):
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


def test_what_is_excluded_and_the_directories_of_runs_stay_here(tmp_path):
    write(tmp_path, "p/a.py", "p/a.ckpt", "p/raw/b", "p/raw/deep/c", "p/__pycache__/a.pyc", "p/runs/x/launcher.lock")
    write(tmp_path, "p/runs/x/checkpoints/step-1/state.json", "p/data/raw/d")
    assert paths([tmp_path / "p"], "*.ckpt", "raw") == ["p/a.py"]
    assert paths([tmp_path / "p"], "raw/*") == ["p/a.ckpt", "p/a.py", "p/data/raw/d"]
    assert paths([tmp_path / "p" / "a.py"], "a.*") == []


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_git_says_what_is_left_out(tmp_path):
    project = write(tmp_path / "p", ".gitignore", "a.py", "kept/b.py", "out/c.bin", "data/d.csv", "new.py", *HOSTILE)
    (project / ".gitignore").write_text("out/\ndata/\n")
    for command in (["init", "-q"], ["add", "a.py"]):
        subprocess.run(["git", "-C", project, *command], check=True)
    (project / "a.py").unlink()
    expected = sorted(f"p/{name}" for name in (".gitignore", "kept/b.py", "new.py", *HOSTILE))
    assert paths([project]) == expected
    assert paths([project / "kept"]) == ["kept/b.py"]
    assert paths([project / "data"]) == ["data/d.csv"], "what is ignored is wanted when it is named"


def test_only_what_is_new_is_sent_and_what_is_gone_is_removed(tmp_path):
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
    (tmp_path / "p/run.sh").chmod(0o751)
    copy([tmp_path / "p"], tmp_path / "host")
    copied = tmp_path / "host" / "p" / "run.sh"
    assert copied.read_bytes() == content
    assert copied.stat().st_mode & 0o777 == 0o751
    assert (tmp_path / "host/p/empty").read_bytes() == b""
    assert [len(data) for data, _ in pieces(copied)] == [1024 * 1024, 1024 * 1024, 17]


def test_what_does_not_exist_is_not_copied(tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "broken").symlink_to("nowhere")
    assert paths([tmp_path / "p", tmp_path / "gone"]) == []
