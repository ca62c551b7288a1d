"""The report of a check that may crash at any time."""

from tfdist_cli.finding import Finding
from tfdist_cli.protocol.check_report import Report, ReportWriter, read_report

FINDING = Finding("no-data", "error", "recipe.py:3", "there is none", "make some")


def test_a_report_comes_back(tmp_path):
    writer = ReportWriter(tmp_path / "report")
    writer.stage("reading")
    writer.finding(FINDING)
    writer.facts("model", bytes=3)
    writer.facts("data", batch="x")
    writer.stage("training")
    report = read_report(tmp_path / "report")
    assert report == Report("training", (FINDING,), {"model": {"bytes": 3}, "data": {"batch": "x"}})


def test_a_process_that_has_written_nothing(tmp_path):
    assert read_report(tmp_path / "report") == Report()


def test_a_line_that_is_cut_off_is_left_out(tmp_path):
    writer = ReportWriter(tmp_path / "report")
    writer.finding(FINDING)
    with (tmp_path / "report").open("a") as file:
        file.write('{"stage": "half')
    assert read_report(tmp_path / "report").findings == (FINDING,)
