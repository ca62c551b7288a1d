"""`tfdist report`: one file about one run or several."""

from tests.support.codes import codes_in
from tests.support.recorded import trained_run


def test_it_writes_a_file_and_says_where(tfdist, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = trained_run(tmp_path / "runs" / "digits-1").path
    (tmp_path / "runs" / "latest").symlink_to("digits-1")
    assert tfdist("report").out == "report.html\n"
    one = (tmp_path / "report.html").read_text()
    assert one.startswith("<!DOCTYPE html>")
    trained_run(tmp_path / "runs" / "digits-2")
    assert tfdist("report", run, tmp_path / "runs" / "digits-2", "--output", "both.html").out == "both.html\n"
    both = (tmp_path / "both.html").read_text()
    assert "digits-1" in both
    assert "digits-2" in both


def test_what_cannot_be_read_or_written(tfdist, tmp_path):
    assert codes_in(tfdist("report", tmp_path).err) == ["not-a-run-dir"]
    run = trained_run(tmp_path / "run").path
    result = tfdist("report", run, "--output", tmp_path / "none" / "report.html")
    assert (result.code, codes_in(result.err)) == (2, ["report-not-written"])
