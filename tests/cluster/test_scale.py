"""Other numbers of tasks: while a training runs, and when it is launched again."""

import subprocess
import sys

import pytest

from tests.support.chaos import RECIPE, UNDISTURBED, Training, accuracy, check_metrics
from tests.support.codes import codes_in
from tests.support.launching import MIRRORED, launch, project

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SMALL = "strategy: parameter_server\nroles: {chief: {}, ps: {}, worker: {}}\nrecipe: recipe.yaml\n"


@pytest.fixture
def training(tmp_path):
    training = Training(tmp_path, SMALL, "--set", "params.microseconds=500", "--max-restarts", "0")
    yield training
    training.stop()


def scale(run, *numbers):
    """Runs `tfdist scale`."""
    command = [sys.executable, "-m", "tfdist_cli", "scale", run, *numbers]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.rotates(5, 1)
def test_digits_continue_with_three_workers_and_two_ps(training):
    training.until(lambda: training.trained and training.trained[-1]["step"] > 50, seconds=180)
    asked = scale(training.run, "worker=3", "ps=2")
    assert asked.returncode == 0, asked.stderr
    done = training.finish(200)
    assert done.code == 0, done.stderr
    assert done.processes_left == []
    (resize,) = done.report["resizes"]
    assert (resize["replicas"], done.report["losses"], done.report["attempts"]) == (
        {"worker": [1, 3], "ps": [1, 2]}, [], 2
    )  # fmt: skip
    (resumed,) = [line["step"] for line in done.lines("events.jsonl") if line["event"] == "resumed"]
    continued = asked.stdout.splitlines()[1]
    assert continued.startswith("worker 1 → 3, ps 1 → 2: ")
    assert f" step {resumed} " in continued
    assert not (done.run_dir / "metrics_lost.jsonl").exists(), "a step was taken twice"
    assert {task["task"] for task in done.report["tasks"]} == {
        "chief:0", "ps:0", "ps:1", "worker:0", "worker:1", "worker:2"
    }  # fmt: skip
    trained = check_metrics(done.run_dir)
    ends = [line for line in trained if line["epoch_done"]]
    assert [line["epoch"] for line in ends] == list(range(1, 21))
    # 1437 digits are 44 batches of 32 for one worker, and 3 times 14 for three, also in the rest of this epoch.
    epoch, taken = divmod(resumed, 44)
    steps = [44] * epoch + [max(taken, 42)] + [42] * (19 - epoch)
    assert [line["values"]["examples"] for line in ends] == [32 * number for number in steps]
    assert ends[-1]["step"] == sum(steps)
    assert sum(trained[-1]["worker_steps"].values()) == sum(steps) - resumed
    assert set(trained[-1]["worker_steps"]) == {"worker:0", "worker:1", "worker:2"}
    assert abs(accuracy(done) - UNDISTURBED) <= 0.01


@pytest.mark.rotates(5, 2)
def test_a_training_goes_on_if_its_model_has_no_layers_for_more_workers(tmp_path):
    cluster = SMALL.replace("parameter_server", "model_parallel").replace("ps: {}, ", "")
    training = Training(tmp_path, cluster, "--set", "train.max_steps=150", "--max-restarts", "0")
    try:
        training.until(lambda: training.trained, seconds=180)
        asked = scale(training.run, "worker=2")
        assert (asked.returncode, asked.stdout, codes_in(asked.stderr)) == (2, "", ["scale-rejected"])
        done = training.finish(200)
    finally:
        training.stop()
    assert (done.code, done.report["resizes"], done.report["attempts"]) == (0, [], 1), done.stderr
    assert check_metrics(done.run_dir)[-1]["step"] == 150


@pytest.mark.rotates(5, 3)
def test_a_training_goes_on_as_before_if_the_data_has_too_few_batches_for_more_workers(tmp_path):
    module = RECIPE.replace("digits.load(split)", "tuple(part[:70] for part in digits.load(split))")
    options = "--set", "params.microseconds=4000", "--set", "train.max_steps=100", "--set", "train.epochs=100"
    training = Training(tmp_path, MIRRORED, *options, "--max-restarts", "0", module=module)
    try:
        training.until(lambda: training.trained, seconds=180)
        asked = scale(training.run, "worker=3")
        assert (asked.returncode, codes_in(asked.stderr)) == (1, ["resize-reverted"])
        done = training.finish(200)
    finally:
        training.stop()
    assert (done.code, done.report["attempts"], done.report["step"]) == (0, 3, 100), done.stderr
    (resize,), (lost,) = done.report["resizes"], done.report["losses"]
    assert resize["resumed"] >= resize["step"]
    assert resize["reverted"].startswith(lost["task"])
    assert {task["task"] for task in done.report["tasks"]} == {"worker:0", "worker:1"}
    assert not (done.run_dir / "metrics_lost.jsonl").exists(), "a step was taken twice"


@pytest.mark.rotates(5, 0)
def test_mirrored_workers_of_another_number_train_the_epochs_that_are_left(tmp_path):
    """Two workers have 16 steps an epoch, one has 32: 24 are one and a half epochs, and 80 more the rest of four."""
    folder = project(tmp_path, MIRRORED)
    first = launch(folder, "--run-dir", "run", "--set", "train.max_steps=24")
    assert first.code == 0, first.stderr
    second = launch(folder, "--run-dir", "run", "--set", "roles.worker.replicas=1")
    assert second.code == 0, second.stderr
    assert "from 2 to 1: " in second.stderr
    ends = [line for line in second.lines("metrics.jsonl") if line["epoch_done"] and line["split"] == "train"]
    assert [(line["epoch"], line["step"]) for line in ends][-3:] == [(2, 40), (3, 72), (4, 104)]
    assert first.processes_left == second.processes_left == []


SERVED = (
    "strategy: parameter_server\n"
    "roles: {chief: {}, ps: {replicas: 2}, worker: {replicas: 2}, data_dispatcher: {}, data_worker: {}}\n"
    "recipe: recipe.yaml\n"
)
SPREAD = """
module: four_classes
train: {epochs: 4, batch_size: 16, share: service}
checkpoint: {every_steps: 1000}
shard: {min_bytes: 100}
"""


@pytest.mark.rotates(5, 1)
def test_a_launch_continues_with_other_numbers_of_every_role_that_has_some(tmp_path):
    """Variables that are spread over two ps go to one, three workers take over from two, two data workers from one."""
    folder = project(tmp_path, SERVED, recipe_yaml=SPREAD)
    first = launch(folder, "--run-dir", "run", "--set", "train.max_steps=40")
    assert first.code == 0, first.stderr
    others = ("roles.ps.replicas=1", "roles.worker.replicas=3", "roles.data_worker.replicas=2")
    second = launch(folder, "--run-dir", "run", *(part for other in others for part in ("--set", other)))
    assert second.code == 0, second.stderr
    assert "step-00000040 (step 40)" in second.stderr
    two, one = [line["bytes"] for line in second.lines("events.jsonl") if line["event"] == "placement"]
    assert (set(two), set(one)) == ({"ps:0", "ps:1"}, {"ps:0"})
    assert sum(two.values()) == sum(one.values())
    trained = [line for line in second.lines("metrics.jsonl") if line["split"] == "train"]
    assert [(line["epoch"], line["step"]) for line in trained if line["epoch_done"]][-3:] == [
        (2, 64),
        (3, 96),
        (4, 128),
    ]
    assert sum(trained[-1]["worker_steps"].values()) == 128 - 40
    assert first.processes_left == second.processes_left == []
