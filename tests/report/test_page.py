"""The report's page: what is in it, and that it is HTML which needs nothing else."""

from datetime import datetime, timezone
from html.parser import HTMLParser

import pytest

from tests.support.recorded import RecordedRun, trained_run
from tfdist_cli.report.data import read_data
from tfdist_cli.report.page import page

VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """The elements of a page, which must be closed in order, and its text."""

    def __init__(self, *runs):
        super().__init__()
        self.html = page([read_data(run.path) for run in runs], datetime(2026, 1, 2, tzinfo=timezone.utc))
        self.open, self.elements, self.words = [], [], []
        self.feed(self.html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script") and data.strip():
            self.words.append(data.strip())

    def of(self, class_):
        return [fields for _, fields in self.elements if class_ in (fields.get("class") or "").split()]

    def after(self, word):
        return self.words[self.words.index(word) + 1]


@pytest.fixture
def trained(tmp_path):
    return Page(trained_run(tmp_path / "digits-1"))


def test_it_needs_nothing_else_and_sends_nothing(trained):
    names = {"src", "href", "action", "formaction", "poster"}
    loaded = [fields[name] for _, fields in trained.elements for name in names & set(fields)]
    assert loaded == ["data:,"]
    assert "url(" not in trained.html
    assert "@import" not in trained.html
    (policy,) = (fields["content"] for tag, fields in trained.elements if tag == "meta" and "http-equiv" in fields)
    assert policy.startswith("default-src 'none'")


def test_the_head_has_the_result_and_where_it_comes_from(trained):
    assert trained.after("digits-1") == "done"
    assert (trained.after("steps"), trained.after("examples"), trained.after("duration")) == ("60", "600", "10 s")
    assert trained.after("commit").startswith("0123456789ab, ")
    assert trained.after("versions").split(", ") == ["Python 3.11.7", "TensorFlow 2.21.0", "Keras 3.15.1"]
    assert (trained.after("lost tasks"), trained.after("launcher")) == ("1", "local")


def test_charts_have_their_lines(trained):
    titles = [trained.words[trained.words.index(name)] for name in ("loss", "accuracy", "All workers", "Each worker")]
    assert len(titles) == 4
    drawn = [fields["aria-label"].partition(", the last")[0] for fields in trained.of("plot")]
    assert drawn[:5] == ["loss", "accuracy", "All workers", "Each worker", "Staleness, mean"]
    assert {"Processor", "Memory", "Sent", "Received", "GPU 0", "GPU 0, memory"} <= set(drawn)
    loss = trained.of("plot")[0]["aria-label"]
    assert "train 0.1667" in loss
    assert "test 0.5" in loss


def test_the_time_line_has_tasks_and_what_happened(trained):
    assert len(trained.of("row")) == 1 + 4 + 1
    titles = [fields["title"] for fields in trained.of("mark") if "title" in fields]
    assert any("SIGKILL" in title for title in titles)
    assert any("checkpoint" in title for title in titles)
    assert len(trained.of("st-failed")) == 1


def test_of_a_run_without_anything_it_says_what_is_missing(tmp_path):
    empty = Page(RecordedRun(tmp_path / "empty"))
    assert len(empty.of("missing")) >= 4
    assert not empty.of("plot")
    assert empty.after("versions") == empty.after("commit") == "not recorded"


def test_what_a_user_wrote_is_text(tmp_path):
    run = RecordedRun(tmp_path / "<b>&amp")
    run.launch(host="<script>alert(1)</script>", commit="</style><script>")
    run.happened(1, "error", task="chief:0", message="</script><img src=x>")
    run.trained(1, 1, values={"</script><svg onload=x>": 1.0})
    run.trained(2, 2, values={"</script><svg onload=x>": 2.0})
    run.settings(epochs="<i>")
    page = Page(run)
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert not {"img", "i onload"} & {tag for tag, _ in page.elements}
    assert page.after("launcher's host") == "<script>alert(1)</script>"


def test_half_a_line_and_values_that_are_no_numbers(tmp_path):
    run = trained_run(tmp_path / "run")
    run.trained(8, 70, values={"loss": float("nan")})
    run.trained(9, 80, values={"loss": 0.1})
    for name in ("metrics.jsonl", "events.jsonl", "resources.jsonl"):
        with (run.path / name).open("a") as file:
            file.write('{"time": "2026-01-02T03:04')
    page = Page(run)
    assert len(page.of("note")) == 1  # of the loss: one value is not finite
    assert "train 0.1" in page.of("plot")[0]["aria-label"]


def test_half_a_surrogate_pair_in_the_settings_can_be_written(tmp_path):
    run = RecordedRun(tmp_path / "run")
    (run.path / "recipe.yaml").write_text('{"\\ud800": "\\udb30"}')
    assert "?" in Page(run).words
    assert Page(run).html.encode()


def test_many_tasks_are_drawn_as_few_lines_and_rows(tmp_path):
    names = [f"worker:{index}" for index in range(100)]
    run = RecordedRun(tmp_path / "run", names)
    run.launch()
    for second in range(20):
        run.trained(second + 1, second + 1, steps_per_second=1.0, worker_steps_per_second=dict.fromkeys(names, 1.0))
    page = Page(run)
    (each,) = (fields["aria-label"] for fields in page.of("plot") if fields["aria-label"].startswith("Each worker"))
    assert each.count(", ") == 3
    assert len(page.of("row")) == 1 + 60 + 1
    assert len(page.html) < 500_000


def test_several_runs_are_compared(tmp_path):
    long, short = trained_run(tmp_path / "a" / "run", epochs=9, loss=0.9), trained_run(tmp_path / "b" / "run")
    page = Page(long, short)
    assert page.words.count("a/run") > 1
    loss = page.of("plot")[0]["aria-label"]
    assert "a/run 0.1" in loss
    assert "b/run 0.1667" in loss
    at = page.words.index("train.epochs")
    assert page.words[at : at + 3] == ["train.epochs", "9", "3"]
    assert "run_dir" not in page.words
    Page(*[trained_run(tmp_path / f"many-{index}") for index in range(12)])


def test_a_run_that_goes_on_says_so(tmp_path, monkeypatch):
    run = RecordedRun(tmp_path / "run")
    run.launch()
    run.happened(1, "started", task="chief:0", pid=1)
    monkeypatch.setattr("tfdist_cli.launch.run.history.launcher_of", lambda path: 4711)
    page = Page(run)
    assert page.after("run") == "running"
    assert page.of("st-starting")
