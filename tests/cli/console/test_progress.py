"""What is shown of a run, on a terminal and where there is none."""

import io
import os
import pty
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from rich.console import Console

from tfdist_cli.cli.console.lines import TaskLines, neutral
from tfdist_cli.cli.console.progress import Display, LiveDisplay, duration, progress_text, scaled_text
from tfdist_cli.launch.run.snapshot import Progress, RunSnapshot
from tfdist_cli.launch.supervisor.events import (
    Exited,
    Output,
    ProfileAccepted,
    ProfileRefused,
    RecordReceived,
    RequestAnswered,
    ResizeAccepted,
    SignalReceived,
    Tick,
)
from tfdist_cli.launch.supervisor.machine import begin, step
from tfdist_cli.launch.supervisor.state import JobPolicy
from tfdist_cli.protocol.profile_order import ProfileOrder
from tfdist_cli.spec.task_id import TaskId

ROOT = str(Path(__file__).parents[3])
CHIEF, PS, WORKER, EVALUATOR = (TaskId.parse(role) for role in ("chief", "ps", "worker", "evaluator"))


class Screen:
    """A display, and the text it has written."""

    def __init__(self, kind, tasks, *, terminal, height=40):
        self.file = io.StringIO()
        console = Console(file=self.file, force_terminal=terminal, width=100, height=height, _environ={"TERM": "xterm"})
        self.snapshot = RunSnapshot()
        self.display = kind(console, self.snapshot)
        self.state, _ = begin(JobPolicy("parameter_server"), tasks, 0.0)

    def at(self, now, *events):
        for event in events:
            self.state, _ = step(self.state, event, now)
            self.snapshot.on_event(event, self.state, now)
            self.display.on_event(event, self.state, now)
        return self

    @property
    def text(self):
        return self.file.getvalue()


def plain(*tasks):
    return Screen(Display, tasks, terminal=False)


def live(*tasks, height=40):
    return Screen(LiveDisplay, tasks, terminal=True, height=height)


def progress(step, **fields):
    return RecordReceived(CHIEF, {"kind": "progress", "step": step, "total": 100, **fields})


def without_colours(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_lines_have_the_name_of_their_task():
    screen = plain(CHIEF, WORKER).at(1, Output(WORKER, "stdout", ("one", "", "[red]two[/] :smile: " + "x" * 200)))
    assert screen.text == "[worker:0] one\n[worker:0] \n[worker:0] [red]two[/] :smile: " + "x" * 200 + "\n"


def test_progress_is_told_every_few_seconds_if_there_is_any():
    screen = plain(CHIEF)
    for now in range(60):
        screen.at(now, Tick())
    assert screen.text == ""
    for now in range(60, 80):
        screen.at(now, progress(now, steps_per_second=4.0, metrics={"loss": 0.25}))
    for now in range(80, 200):
        screen.at(now, Tick())
    told = screen.text.splitlines()
    assert ["left" in line for line in told] == [False, *[True] * 4]
    assert told[1] == "[tfdist] step 65/100  4.0 steps/s  35 s left  loss 0.25"
    assert [line.split()[2] for line in told] == ["60/100", "65/100", "70/100", "75/100", "79/100"]


def test_the_table_shows_how_far_an_evaluation_is():
    screen = Screen(LiveDisplay, (CHIEF, EVALUATOR), terminal=True)
    state, evaluated = {"kind": "state", "state": "evaluating"}, {"kind": "evaluated", "batches": 120, "total": 500}
    with screen.display.on_screen():
        screen.at(1, *(RecordReceived(CHIEF, record) for record in (state, evaluated)))
        screen.at(2, RecordReceived(EVALUATOR, state), RecordReceived(EVALUATOR, evaluated | {"total": None}), Tick())
        screen.at(3, Tick())
    assert "evaluating, 120 of 500 batches" in screen.text
    assert "evaluating, 120 batches" in screen.text
    screen.at(4, RecordReceived(CHIEF, state | {"state": "training"}))
    assert screen.snapshot.of(CHIEF).evaluated == ""


def test_what_the_launcher_does_is_told():
    assert plain(CHIEF, PS, EVALUATOR).at(1, Exited(EVALUATOR, 3), Exited(CHIEF, 0)).text == (
        "[tfdist] evaluator:0 failed: exit code 3\n"
    )
    assert "waiting for the evaluator" in plain(CHIEF, PS, EVALUATOR).at(1, Exited(CHIEF, 0)).text
    saving, killing = plain(CHIEF, PS).at(1, SignalReceived(2), SignalReceived(2)).text.splitlines()
    assert saving.startswith("[tfdist] SIGINT: ")
    assert " 30 s " in saving
    assert killing.endswith(": chief:0, ps:0")
    profile = (ProfileAccepted(PS, ProfileOrder("a", 2.0, "x")), ProfileRefused("b", PS, "no", "", "x"))
    accepted, refused = plain(CHIEF, PS).at(1, *profile).text.splitlines()
    assert accepted.endswith(" ps:0 for 2 s")
    assert refused.endswith(" ps:0: no")
    asked = (RequestAnswered("a", "refused", reason="no"), ResizeAccepted("b", {"ps": (1, 0)}, (CHIEF,)))
    rejected, scaled, saving = plain(CHIEF, PS).at(1, *asked).text.splitlines()
    assert rejected.endswith(": no")
    assert " ps 1 → 0 " in scaled
    assert " 30 s " in saving


def test_tasks_that_come_and_go():
    second = TaskId("worker", 1)
    shown = plain(CHIEF, WORKER, PS).at(
        1,
        RecordReceived(CHIEF, {"kind": "elastic", "joins": True}),
        ResizeAccepted("r", {"worker": (1, 2)}, (CHIEF, WORKER, second, PS), joins=(second,)),
        RecordReceived(CHIEF, {"kind": "joined", "worker": "worker:1"}),
        RecordReceived(CHIEF, {"kind": "join_refused", "worker": "worker:7", "reason": "full"}),
        RecordReceived(second, {"kind": "state", "state": "left"}),
        Exited(second, 0),
        ResizeAccepted("s", {"worker": (1, 2)}, (CHIEF, WORKER, second, PS), joins=(second,)),
        Exited(second, 3),
    )
    scaled, joined, refused, left, again, failed = shown.text.splitlines()
    assert "worker 1 → 2: worker:1" in scaled
    assert "worker:1 has joined" in joined
    assert "worker:7 may not join: full" in refused
    assert "worker:1 has left" in left
    assert "worker 1 → 2" in again
    assert "worker:1 failed to join: exit code 3" in failed


@pytest.mark.parametrize(
    ("scaled", "text"),
    [
        ({"took": None}, ""),
        ({"took": 19.0, "resumed": 7}, "training continued from step 7 after 19 s"),
        ({"took": 19.0, "resumed": None}, "training continued from the beginning after 19 s"),
        (
            {"took": 2.1, "joined": ["worker:1"], "left": [], "failed": ["worker:2"]},
            "worker:1 joined and worker:2 failed to join after 2.1 s; the others continued",
        ),
        (
            {"live": True, "took": 9.0, "left": ["worker:1"], "lost": ["worker:2"]},
            "worker:1 left and worker:2 lost after 9.0 s; the others continued",
        ),
        (
            {"live": False, "took": 19.0, "resumed": 7, "lost": ["chief:0"]},
            "training continued from step 7 after 19 s; chief:0 lost",
        ),
        (
            {"live": False, "took": 19.0, "resumed": 7, "reverted": "chief:0: exit code 1"},
            "training continued from step 7 after 19 s; with the numbers from before, since chief:0: exit code 1",
        ),
        ({"took": 0.5, "left": ["worker:1", "worker:2"]}, "worker:1, worker:2 left after 0.5 s; the others continued"),
    ],
)
def test_what_became_of_a_request(scaled, text):
    assert scaled_text(scaled) == text


def test_the_live_table():
    screen = live(CHIEF, PS, WORKER)
    with screen.display.on_screen():
        screen.at(0.1, Output(WORKER, "stderr", ("scrolls by",), "10%"))
        screen.at(1, RecordReceived(WORKER, {"kind": "state", "state": "serving"}))
        screen.at(1, progress(45, epoch=1, epochs=2, steps_per_second=5, workers={"worker:0": 5.0}))
        screen.at(2, progress(50, epoch=1, epochs=2, steps_per_second=5, workers={"worker:0": 5.0}))
        screen.at(3, Exited(PS, -9))
    shown = without_colours(screen.text)
    assert "[worker:0] scrolls by\n" in shown
    assert re.search(r"worker:0 +serving +5\.0 steps/s +10%", shown)
    assert re.search(r"ps:0 +killed by SIGKILL", shown)
    assert "step 50/100  epoch 1/2  5.0 steps/s  10 s left" in shown
    assert screen.text.endswith("\x1b[?25h") or "\x1b[?25h" in screen.text[-200:]


def test_lines_are_shown_in_order_and_at_the_end_at_the_latest():
    screen = live(CHIEF)
    with screen.display.on_screen():
        for number in range(5000):
            screen.at(0.3, Output(CHIEF, "stdout", (str(number),)))
    shown = re.findall(r"\[chief:0\] (\d+)\n", without_colours(screen.text))
    assert shown == [str(number) for number in range(5000)]


def test_roles_share_a_row_where_the_tasks_would_not_fit():
    workers = [TaskId("worker", index) for index in range(50)]
    screen = live(CHIEF, *workers, height=24)
    with screen.display.on_screen():
        screen.at(1, Exited(workers[3], 0), Tick())
        rates = {str(worker): 2.0 for worker in workers}
        others = {name: rates.pop(name) for name in list(rates)[30:]}
        screen.at(2, progress(1, workers=rates))
        screen.at(3, RecordReceived(CHIEF, {"kind": "rates", "workers": others}))
    shown = without_colours(screen.text)
    assert re.search(r"worker ×50 +49 running, 1 failed +100\.0 steps/s", shown)
    assert max(len(line) for line in shown.splitlines()) <= 100


def test_a_terminal_that_has_gone_away_is_left_alone():
    screen = plain(CHIEF)
    screen.file.close()
    screen.display._console.file = Gone()
    screen.at(1, Output(CHIEF, "stdout", ("x",)))
    assert screen.display._console.quiet
    screen.at(2, Output(CHIEF, "stdout", ("x",)))


class Gone(io.StringIO):
    def write(self, text):
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain é 中 😀\ttab", "plain é 中 😀\ttab"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07x\x1b]8;;http://a\x1b\\y", "xy"),
        ("\x1b[2J\x1b[Hcleared", "cleared"),
        ("\x1bc reset \x1b(B", " reset "),
        ("bell\x07 back\x08 nul\x00 csi\x9b31m", "bell back nul csi31m"),
        ("half\x1b", "half"),
        ("abc\u202edef", "abcdef"),
    ],
)
def test_control_sequences_are_taken_out(text, safe):
    assert neutral(text) == safe


def test_colours_only_where_they_are_wanted():
    def printed(**options):
        file = io.StringIO()
        console = Console(file=file, **options)
        lines = TaskLines()
        lines.add(WORKER, ["x"])
        console.print(lines, end="", soft_wrap=True)
        return file.getvalue()

    terminal = {"TERM": "xterm-256color"}
    assert printed(force_terminal=True, _environ=terminal) == "\x1b[36m[worker:0] \x1b[0mx\n"
    assert printed(force_terminal=True, _environ=terminal | {"NO_COLOR": "1"}) == "[worker:0] x\n"
    assert printed(force_terminal=False, _environ=terminal) == "[worker:0] x\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (3.44, "3.4 s"), (59.4, "59 s"), (60, "1:00"), (3723, "1:02:03"), (float("inf"), "unlimited")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_progress_says_only_what_is_known():
    assert progress_text(Progress(5, None, None, None, 0.0, {}, {}), None) == "step 5"
    assert (
        progress_text(Progress(5, 6, None, None, 5e-324, {}, {}), float("inf"))
        == "step 5/6  0.0 steps/s  unlimited left"
    )
    assert progress_text(Progress(5, 5, 1, None, 2.0, {}, {}), None) == "step 5/5  epoch 1  2.0 steps/s"


@pytest.mark.slow
@pytest.mark.parametrize("no_color", [False, True])
def test_on_a_real_terminal(tmp_path, no_color):
    (tmp_path / "one.yaml").write_text("strategy: single\nroles: {chief: {}}\n")
    code = """
        import time
        from tfdist_cli.protocol.records import emit
        emit("state", state="training")
        emit("progress", step=5, total=10, epoch=1, epochs=1, steps_per_second=1.0, metrics={}, workers={})
        print("a line of the task", flush=True)
        time.sleep(0.6)
    """
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": ROOT, "TERM": "xterm", "COLUMNS": "90", "LINES": "30"}
    environment |= {"NO_COLOR": "1"} if no_color else {}
    command = [
        sys.executable,
        "-m",
        "tfdist_cli",
        "launch",
        "one.yaml",
        "--",
        sys.executable,
        "-c",
        textwrap.dedent(code),
    ]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 65536):
            shown += data
    except OSError:  # how Linux tells the end of a terminal
        pass
    os.close(ours)
    out = process.communicate()[0].decode()
    text = shown.decode()
    assert process.returncode == 0
    assert "a line of the task\r\n" in without_colours(text)
    assert re.search(r"chief:0 +training", without_colours(text))
    assert "step 5/10" in without_colours(text)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert ("\x1b[35m" in text) is not no_color
    assert re.search(r"chief:0 +done", out)
    assert "\x1b" not in out


@pytest.mark.parametrize(("width", "shown"), [(100, True), (60, False)])
def test_what_tasks_use_is_in_the_table_if_there_is_room(width, shown):
    screen = live(CHIEF, WORKER)
    screen.display._console.width = width
    usage = {"cpu": 0.94, "memory": 412e6, "sent": 1.2e6, "received": 0}
    beat = {"kind": "beat", "computed": 1.0, "usage": usage}
    with screen.display.on_screen():
        screen.at(1, RecordReceived(WORKER, beat), progress(5, workers={"worker:0": 3.0})).at(2, Tick())
    table = without_colours(screen.text).rpartition("worker:0")[2]
    assert "0.9 cores" in table
    assert ("412 MB" in table) == ("↑1.2 MB/s" in table) == shown


def test_many_tasks_share_a_row_with_what_they_use_together():
    workers = [TaskId("worker", index) for index in range(30)]
    screen = live(*workers, height=10)
    with screen.display.on_screen():
        screen.at(
            1, *(RecordReceived(each, {"kind": "beat", "usage": {"cpu": 0.5, "memory": 1e8}}) for each in workers)
        )
        screen.at(2, Tick())
    table = without_colours(screen.text)
    assert "15.0 cores" in table
    assert "3.0 GB" in table
