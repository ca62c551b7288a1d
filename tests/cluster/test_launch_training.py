"""What a user sees of a whole training: launched by the command, read from its run directory."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.support.launching import MIRRORED, PARAMETER_SERVER, RECIPE, RECIPE_YAML, finish, launch, project, start
from tfdist_cli.launch.supervisor.restarts import SAME_FAILURE

pytestmark = pytest.mark.cluster

SERVE = """
import sys
import numpy as np
import tensorflow as tf
loaded = tf.saved_model.load(sys.argv[1])
served = loaded.serve(np.full((3, 8), 0.5, np.float32)).numpy()
assert "tfdist_cli" not in sys.modules
import keras
np.testing.assert_allclose(keras.saving.load_model(sys.argv[2])(np.full((3, 8), 0.5, np.float32)), served, rtol=1e-5)
print("same")
"""


def check_tracked(done):
    """The trackers have the numbers of the run's files."""
    folder = done.run_dir / "tracking"
    series_of = (("metrics", "train", "train"), ("metrics", "test", "test"), ("evaluation", "evaluator", None))
    for source, series, split in series_of:
        lines = [line for line in done.lines(f"{source}.jsonl") if split in (None, line["split"])]
        expected = [(line["step"], (line.get("values") or line["metrics"])["loss"]) for line in lines]
        with (folder / "csv" / f"{source}.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if (row["series"], row["name"]) == (series, "loss")]
        assert [(int(row["step"]), float(row["value"])) for row in rows] == expected
        assert list((folder / "tensorboard" / series).glob("*tfevents*"))
    logs = list(folder.glob("*.log"))
    assert logs
    assert all(log.read_text() == "" for log in logs)


@pytest.mark.rotates(1)
def test_parameter_servers_train_score_save_and_export(tmp_path):
    folder = project(tmp_path / "Übung eins", PARAMETER_SERVER % ", evaluator: {}")
    done = launch(folder, "--track", "csv", "--track", "tensorboard")
    assert done.code == 0, done.stderr
    assert done.processes_left == []
    run = done.run_dir
    assert run.parent == folder / "runs"
    for name in ("cluster.yaml", "recipe.yaml", "plan.json", "events.jsonl", "metrics.jsonl", "evaluation.jsonl"):
        assert (run / name).is_file(), f"{name}: {done.stderr}"
    # 212 weights with two slots each, two metrics of two numbers, the learning rate; and iterations, an int64.
    (placed,) = [line for line in done.lines("events.jsonl") if line["event"] == "placement"]
    assert (placed["bytes"], placed["variables"]) == ({"ps:0": 4 * (3 * 212 + 4 + 1) + 8}, {"ps:0": 4})
    # 2 shards of 256 examples make 2 x 16 batches of 16 in each of 4 epochs.
    trained = [line for line in done.lines("metrics.jsonl") if line["split"] == "train"]
    assert trained[-1]["step"] == 128
    assert sum(trained[-1]["worker_steps"].values()) == 128
    assert trained[-1]["values"]["accuracy"] > 0.5
    assert [line["epoch"] for line in trained if line["epoch_done"]] == [1, 2, 3, 4]
    assert {line["step"] for line in done.lines("evaluation.jsonl")} == {40, 80, 120, 128}
    assert done.lines("evaluation.jsonl")[-1]["final"]
    assert sorted(entry.name for entry in (run / "checkpoints").glob("step-*"))[-1] == "step-00000128"
    check_tracked(done)
    exported = [run / "export" / "saved_model", run / "export" / "model.keras"]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = subprocess.run(
        [sys.executable, "-c", SERVE, *exported], cwd="/", env=alone, capture_output=True, text=True, check=False
    )
    assert shown.stdout == "same\n", shown.stderr


@pytest.mark.rotates(1)
def test_mirrored_workers_train_and_a_second_launch_continues_at_the_exact_step(tmp_path):
    folder = project(tmp_path, MIRRORED)
    first = launch(folder, "--run-dir", "run", "--set", "train.max_steps=30")
    assert first.code == 0, first.stderr
    assert first.lines("metrics.jsonl")[-1]["step"] == 30
    second = launch(folder, "--run-dir", "run", "--set", "train.max_steps=51")
    assert second.code == 0, second.stderr
    assert second.run_dir == first.run_dir
    assert "step 30" in second.stderr
    steps = [line["step"] for line in second.lines("metrics.jsonl")]
    assert steps == sorted(steps)
    assert steps[-1] == 51
    assert (second.run_dir / "attempt_2").is_dir()
    assert second.processes_left == first.processes_left == []


PROGRAM = """
import os
import sys
import numpy as np
import keras
import tensorflow as tf
import tfdist_cli as tfdist

with tfdist.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.default_rng(0).random((64, 4), np.float32)
history = tfdist.fit(model, (x, x.sum(axis=1)), epochs=3, validation_data=(x, x.sum(axis=1)))
print("iterations", int(model.optimizer.iterations.numpy()), len(history.history["val_loss"]), sys.argv[1])
with open(f"/proc/{os.getppid()}/cmdline") as parent:
    print("forked" if "fork_server" in parent.read() else "started")
"""


@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    ("cluster", "task", "steps"), [(PARAMETER_SERVER % "", "chief-0", 6), (MIRRORED, "worker-1", 3)]
)
def test_a_users_own_program_trains_in_each_task(tmp_path, cluster, task, steps):
    folder = project(tmp_path, cluster)
    (folder / "train.py").write_text(PROGRAM)
    done = launch(folder, "--", sys.executable, "train.py", "an argument")
    assert done.code == 0, done.stderr
    output = (done.run_dir / "attempt_1" / task / "stdout.log").read_text()
    assert output == f"iterations {steps} 3 an argument\nforked\n"
    assert done.processes_left == []


@pytest.mark.rotates(5)
@pytest.mark.parametrize("index", [0, 1])
def test_a_task_that_exits_before_it_joins_fails_the_launch_long_before_the_start_timeout(tmp_path, index):
    folder = project(tmp_path, MIRRORED)
    leaves = f"import json, os\nif json.loads(os.environ['TF_CONFIG'])['task']['index'] == {index}: raise SystemExit\n"
    (folder / "train.py").write_text(leaves + PROGRAM)
    done = launch(folder, "--start-timeout", 1000, "--", sys.executable, "train.py")
    assert done.code == 1, done.stderr
    failed = [(task["task"], task["code"]) for task in done.report["tasks"] if task["status"] == "failed"]
    assert failed == [(f"worker:{index}", 0)]
    assert done.processes_left == []


FAILURES = {
    "error in model": (
        RECIPE.replace("    network = ", "    raise KeyError('my own mistake')\n    network = "),
        r"KeyError: 'my own mistake'",
    ),
    "not compiled": (RECIPE.replace("network.compile(", "(lambda *_, **__: None)("), r"not compiled"),
    "wrong shape": (RECIPE.replace("keras.Input((8,))", "keras.Input((9,))"), r"the model takes \(None, 9\)"),
    "batched twice": (
        RECIPE.replace(".shard(shard.count", ".batch(8).shard(shard.count"),
        r"train\.batch_size is 16, and .* returns batches",
    ),
    "not a number": (
        RECIPE.replace('params.get("learning_rate", 0.01)', 'float("inf")'),
        r"the loss is nan at step \d+ \(taken by worker:[01]\)",
    ),
    "error in a worker": (
        RECIPE.replace("from_tensor_slices((x, y))", "from_tensor_slices((x, y)).map(lambda a, b: (a, b // (b - b)))"),
        r"division by zero",
    ),
}


@pytest.mark.rotates(5)
@pytest.mark.parametrize("name", FAILURES)
def test_the_first_failure_is_the_headline_and_is_reported_once(tmp_path, name):
    module, expected = FAILURES[name]
    done = launch(project(tmp_path, recipe=module), "--max-restarts", 0)
    assert done.code in (1, 2), done.stderr
    assert done.processes_left == []
    assert re.search(r"^error\[[a-z-]+\]: chief:0", done.stderr, re.MULTILINE), done.stderr
    assert re.search(expected, done.stderr), done.stderr
    saved = json.loads((done.run_dir / "attempt_1" / "chief-0" / "error.json").read_text())
    assert re.search(expected, saved["message"] + saved["traceback"] + saved["type"])
    log = (done.run_dir / "attempt_1" / "chief-0" / "stderr.log").read_text()
    assert log.count("Traceback (most") <= 1


def test_an_error_of_the_users_is_worth_one_restart_and_then_reported_as_what_it_is(tmp_path):
    done = launch(project(tmp_path, recipe=FAILURES["error in model"][0]))
    assert done.code == 1, done.stderr
    assert (done.report["attempts"], [loss["task"] for loss in done.report["losses"]]) == (2, ["chief:0"])
    assert done.report["code"] == "task-failed"
    assert f"note: {SAME_FAILURE}\n" in done.stderr


def test_data_that_ends_early_names_the_worker_or_starts_again_as_asked(tmp_path):
    folder = project(tmp_path, recipe_yaml=RECIPE_YAML.replace("batch_size: 16", "batch_size: 16, repeat: false"))
    done = launch(folder, "--set", "train.epochs=2", "--max-restarts", 0)
    assert done.code == 1
    assert done.report["code"] == "data-ended-early"
    assert re.search(r"worker:[01]", done.report["headline"]), done.stderr
    assert "train.repeat: true" in done.stderr


@pytest.mark.rotates(5)
@pytest.mark.parametrize("cluster", [PARAMETER_SERVER % "", MIRRORED], ids=["parameter_server", "mirrored"])
def test_ctrl_c_saves_a_checkpoint_and_leaves_nothing_behind(tmp_path, cluster):
    folder = project(tmp_path, cluster)
    never = "checkpoint.every_steps=1000000000"
    process = start(folder, "--run-dir", "run", "--set", "train.epochs=100000", "--set", never)
    watcher = folder / "run" / "metrics.jsonl"
    _await(watcher.exists, process)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.code == 130, done.stderr
    assert done.processes_left == []
    assert len(list((folder / "run" / "checkpoints").glob("step-*"))) == 1


SLOW = """class Slow(keras.layers.Layer):
    def call(self, x):
        one = tf.while_loop(lambda i, _: i < 1000, lambda i, m: (i + 1, m @ m), (0, tf.eye(256)))[1][0, 0]
        return x * one


def model("""


@pytest.mark.timed
def test_a_training_of_slow_steps_saves_and_ends_soon_when_reported_to(tmp_path):
    module = RECIPE.replace("def model(", SLOW).replace("keras.Input((8,)),", "keras.Input((8,)), Slow(),")
    folder = project(tmp_path, recipe=module)
    long = ("checkpoint.every_steps=100000", "train.steps_per_epoch=1000", "train.steps_per_execution=auto")
    process = start(folder, "--run-dir", "run", *(f"--set={each}" for each in long))
    watcher = folder / "run" / "metrics.jsonl"

    def far_enough():
        return watcher.exists() and any(int(step) > 80 for step in re.findall(r'"step":(\d+)', watcher.read_text()))

    _await(far_enough, process)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    done = finish(process)
    took = time.monotonic() - started
    assert done.code == 130, done.stderr
    assert took < 6, "20 steps at once, 3 times for each worker, take longer"
    assert max(int(path.name[5:]) for path in (folder / "run" / "checkpoints").glob("step-*")) > 80


@pytest.mark.rotates(5, 3)
def test_two_launches_at_once_do_not_meet(tmp_path):
    processes = [start(project(tmp_path / str(number))) for number in range(2)]
    for process in processes:
        done = finish(process, timeout=150)
        assert done.code == 0, done.stderr


@pytest.mark.rotates(5, 2)
def test_proxies_do_not_stand_between_tasks(tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    done = launch(project(tmp_path), "--set", "train.max_steps=10")
    assert done.code == 0, done.stderr


def _await(condition, process, seconds=90):
    """Waits for a condition that nothing announces, while a process lives."""
    for _ in range(seconds * 10):
        if condition():
            return
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(process.communicate()[1])
    raise AssertionError("it did not come")
