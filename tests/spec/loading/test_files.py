"""Reading files, and paths that are no readable file."""

import errno
import os
import threading
from pathlib import Path

import pytest

from tests.support.codes import raises
from tfdist_cli.spec.loading.files import LARGEST, read_text
from tfdist_cli.spec.loading.problems import Place, SpecError


def refused(path):
    """The code, and the hint, of the error that reading a path raises."""
    with pytest.raises(SpecError) as caught:
        read_text(path, Place("f.yaml"))
    assert str(caught.value).startswith("f.yaml: ")
    return caught.value.code, caught.value.hint


def test_reads_with_and_without_a_byte_order_mark(tmp_path):
    (tmp_path / "a").write_bytes("é: 1\r\n".encode())
    (tmp_path / "b").write_bytes(b"\xef\xbb\xbf\xc3\xa9: 1\r\n")
    assert read_text(tmp_path / "a", Place("a")) == read_text(tmp_path / "b", Place("b")) == "é: 1\r\n"


def test_a_missing_file_names_the_nearest(tmp_path):
    for name in ("cluster.yaml", "recipe.yml", "notes.txt"):
        (tmp_path / name).write_text("")
    code, hint = refused(tmp_path / "clutser.yaml")
    assert code == "no-such-file"
    assert f"{tmp_path}/cluster.yaml" in hint
    code, hint = refused(tmp_path / "x")
    assert code == "no-such-file"
    assert hint.endswith("cluster.yaml, recipe.yml")
    assert refused(tmp_path / "no" / "x.yaml") == ("no-such-file", None)


def test_a_link_to_a_missing_file(tmp_path):
    (tmp_path / "cluster.yaml").symlink_to(tmp_path / "gone.yaml")
    assert refused(tmp_path / "cluster.yaml") == ("broken-link", None)
    assert refused(tmp_path / "clutser.yaml") == ("no-such-file", None), "the link is no better"


def test_a_directory(tmp_path):
    (tmp_path / "cluster.yaml").write_text("")
    code, hint = refused(tmp_path)
    assert code == "not-a-file"
    assert hint.endswith("cluster.yaml")


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null"])
def test_a_device(path):
    assert refused(Path(path))[0] == "not-a-file"


def test_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    thread = threading.Thread(target=refused, args=(tmp_path / "pipe",), daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()


def test_too_large(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(b"#" * LARGEST)
    assert len(read_text(path, Place("f"))) == LARGEST
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert refused(path)[0] == "file-too-large"


def test_a_file_of_the_kernel_has_an_end():
    if Path("/proc/self/maps").exists():
        assert read_text(Path("/proc/self/status"), Place("f"))


def test_not_text(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"a: 1\n\xff")
    with raises(SpecError, "not-utf-8") as caught:
        read_text(path, Place("f.yaml"))
    assert "byte 5 is 0xff" in str(caught.value)
    path.write_bytes("a: 1".encode("utf-16"))
    assert refused(path)[0] == "not-utf-8"


def test_unreadable(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with raises(SpecError, "unreadable-file") as caught:
        read_text(loop, Place("f.yaml"))
    assert os.strerror(errno.ELOOP) in str(caught.value)
    assert refused(tmp_path / ("x" * 5000))[0] == "unreadable-file"
    assert refused(Path("a\0b"))[0] == "unreadable-file"
    secret = tmp_path / "secret"
    secret.write_text("")
    secret.chmod(0)
    if not os.access(secret, os.R_OK):
        assert refused(secret)[0] == "unreadable-file"
