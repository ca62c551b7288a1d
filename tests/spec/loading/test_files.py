"""Reading files that are not what they were thought to be."""

import os
import threading
from pathlib import Path

import pytest

from tfdist_cli.spec.loading.files import LARGEST, read_text
from tfdist_cli.spec.loading.problems import Place, SpecError


def told(path):
    with pytest.raises(SpecError) as caught:
        read_text(path, Place("f.yaml"))
    return str(caught.value), caught.value.hint


def test_reads_with_and_without_a_byte_order_mark(tmp_path):
    (tmp_path / "a").write_bytes("é: 1\r\n".encode())
    (tmp_path / "b").write_bytes(b"\xef\xbb\xbf\xc3\xa9: 1\r\n")
    assert read_text(tmp_path / "a", Place("a")) == read_text(tmp_path / "b", Place("b")) == "é: 1\r\n"


def test_a_missing_file_names_the_nearest(tmp_path):
    for name in ("cluster.yaml", "recipe.yml", "notes.txt"):
        (tmp_path / name).write_text("")
    assert told(tmp_path / "clutser.yaml") == ("f.yaml: no such file", f"did you mean {tmp_path}/cluster.yaml?")
    assert told(tmp_path / "x") == (
        "f.yaml: no such file",
        f"the YAML files in {tmp_path} are cluster.yaml, recipe.yml",
    )
    assert told(tmp_path / "no" / "x.yaml") == ("f.yaml: no such file", None)


def test_a_directory(tmp_path):
    (tmp_path / "cluster.yaml").write_text("")
    assert told(tmp_path) == (
        "f.yaml: is a directory: expected a YAML file",
        f"the YAML files in {tmp_path} are cluster.yaml",
    )


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null"])
def test_a_device(path):
    assert told(Path(path))[0] == "f.yaml: is not a regular file: expected a YAML file"


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    thread = threading.Thread(target=told, args=(tmp_path / "pipe",), daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()


def test_too_large(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(b"#" * LARGEST)
    assert len(read_text(path, Place("f"))) == LARGEST
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert told(path)[0] == "f.yaml: is larger than 1 MiB: expected a YAML file written by hand"


def test_a_file_of_the_kernel_has_an_end():
    if Path("/proc/self/maps").exists():
        assert read_text(Path("/proc/self/status"), Place("f"))


def test_not_text(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"a: 1\n\xff")
    assert told(path)[0] == "f.yaml: is not UTF-8 text: byte 5 is 0xff"
    path.write_bytes("a: 1".encode("utf-16"))
    assert told(path)[0] == "f.yaml: is not UTF-8 text: byte 0 is 0xff"


def test_unreadable(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "f.yaml: cannot be read: Too many levels of symbolic links" in told(loop)[0]
    assert told(tmp_path / ("x" * 5000))[0] == "f.yaml: cannot be read: File name too long"
    assert told(Path("a\0b"))[0].startswith("f.yaml: cannot be read: ")
    secret = tmp_path / "secret"
    secret.write_text("")
    secret.chmod(0)
    if not os.access(secret, os.R_OK):
        assert told(secret)[0] == "f.yaml: cannot be read: Permission denied"
