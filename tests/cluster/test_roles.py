"""`tfdist role`: each task started by itself with TF_CONFIG only, and its errors."""

import json
import re
import signal
import socket
from datetime import datetime

import pytest

import tfdist_cli as tfdist
from tests.support.codes import codes_in, raises
from tests.support.launching import RECIPE, project
from tests.support.tasks import ROLE, TIMEOUT, alone
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.run.directory import open_run_dir
from tfdist_cli.launch.run.history import Outcome
from tfdist_cli.report.data import read_data
from tfdist_cli.report.page import page
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(700)]

PS = {"chief": 1, "ps": 1, "worker": 1}
RECIPE_YAML = "module: four_classes\ntrain: {epochs: 2, batch_size: 16, steps_per_execution: 4}\n%s"
THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "4"}
KEPT = "checkpoint: {every_steps: 10, dir: kept}\n"


@pytest.fixture
def train(cluster, tmp_path):
    """Starts every task of a cluster on a recipe."""

    def start(
        roles, module=RECIPE, recipe_yaml=RECIPE_YAML % "", tasks=(), env=None, arguments=(), taken=None, *, fresh=False
    ):
        folder = project(tmp_path / "project", recipe=module, recipe_yaml=recipe_yaml)
        made = cluster(**roles)
        made.addresses |= {TaskId.parse(task): Address("127.0.0.1", port) for task, port in (taken or {}).items()}
        # A task that plans for itself executes a new program, so it cannot stay a fork.
        planned = () if fresh else ("--planned",)
        for task in tasks or made.tasks:
            serves = "ps" in roles and task.startswith(("ps", "worker"))
            argv = (*ROLE, *planned, *(() if serves else ("--recipe", str(folder / "recipe.yaml"), *arguments)))
            own = {"TFDIST_RUN_DIR": str(tmp_path / "run")} | ({} if fresh else THREADS) | (env or {})
            made.start(argv, task, env=own, fresh=fresh)
        return made

    return start


def codes(ended):
    return {task: one.code for task, one in ended.items()}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")


def test_an_evaluator_scores_each_checkpoint_and_all_end_by_themselves(train, tmp_path):
    tasks = train(PS | {"evaluator": 1, "worker": 2}, recipe_yaml=RECIPE_YAML % KEPT, env=PROXIES, fresh=True)
    ended = tasks.finish()
    assert codes(ended) == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    assert tasks.leftover_processes() == []
    scores = lines(tmp_path / "run" / "evaluation.jsonl")
    assert {line["step"] for line in scores} == {10, 20, 30, 40, 50, 60, 64}
    assert [line["final"] for line in scores] == [False] * 6 + [True]
    last = lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (last["split"], last["step"]) == ("test", 64)
    assert scores[-1]["values"] == pytest.approx(last["values"], rel=1e-5)


@pytest.fixture
def by_hand(cluster, tmp_path):
    """Starts each task of a cluster file, `PS` with two workers, by a command of its own; the run is in `run`."""

    def start(**recipe):
        made = cluster(**PS | {"worker": 2})
        hosts = {role: [str(each) for task, each in made.addresses.items() if task.role == role] for role in PS}
        content = {
            "strategy": "parameter_server",
            "roles": {role: {"hosts": addresses} for role, addresses in hosts.items()},
            "recipe": "recipe.yaml",
        }
        folder = project(tmp_path / "project", cluster=json.dumps(content), **recipe)
        for task in made.tasks:
            argv = (*ROLE, "--task", task, "--cluster", folder / "cluster.yaml", "--run-dir", tmp_path / "run")
            made.start(argv, task, env={"TF_CONFIG": ""}, fresh=True)
        return made

    return start


def test_every_task_of_a_file_started_by_hand_is_a_launch(by_hand, tmp_path):
    made = by_hand()
    ended = made.finish()
    assert codes(ended) == dict.fromkeys(made.tasks, 0), made.outputs()
    trained = [line for line in lines(tmp_path / "run" / "metrics.jsonl") if line["split"] == "train"]
    assert trained[-1]["step"] == 128
    assert sum(trained[-1]["worker_steps"].values()) == 128
    assert set(trained[-1]["worker_steps"]) == {"worker:0", "worker:1"}
    assert (tmp_path / "run" / "export" / "saved_model").is_dir()
    view = tfdist.Run(tmp_path / "run").wait(0)
    assert (view.outcome, view.manual, view.step, view.result["exit_code"]) == (Outcome.DONE, True, 128, 0)
    assert {str(each.task): each.state for each in view.tasks} == dict.fromkeys(made.tasks, "done")
    assert "started by hand" in page([read_data(view.path)], datetime.now().astimezone())


@pytest.mark.rotates(5, 3)
def test_a_run_whose_tasks_were_started_by_hand_is_shown_and_stopped(by_hand, tmp_path):
    made, run_dir = by_hand(recipe_yaml=RECIPE_YAML.replace("epochs: 2", "epochs: 100000") % ""), tmp_path / "run"
    made.await_path("chief:0", run_dir / "metrics.jsonl")
    run = tfdist.Run(run_dir)
    view = run.status()
    assert view.outcome is Outcome.RUNNING
    assert {str(each.task): each.pid for each in view.tasks} == {task: made.processes[task].pid for task in made.tasks}
    with raises(UsageError, "run-dir-in-use"), open_run_dir(run_dir, tmp_path, "again", datetime.now().astimezone()):
        pass
    made.processes["worker:0"].kill()
    made.processes["worker:0"].wait()
    assert [each.state for each in run.status().tasks if each.task.role == "worker"] == ["lost", "serving"]
    view = run.stop()
    assert (view.outcome, view.result["signal"]) == (Outcome.STOPPED, "SIGTERM")
    made.finish()


@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    ("roles", "updates"),
    [
        (PS, "{mode: async}"),
        (PS | {"worker": 2}, "{mode: sync}"),
        (PS | {"worker": 2}, "{mode: bounded, staleness: 2}"),
        ({"worker": 2}, "{mode: sync}"),
    ],
    ids=["asynchronous", "synchronous", "bounded", "mirrored"],
)
def test_a_task_that_is_reported_to_end_saves_first(roles, updates, train, tmp_path):
    yaml = RECIPE_YAML.replace("epochs: 2", "epochs: 100000") % KEPT.replace("10", "1000000") + f"updates: {updates}\n"
    tasks = train(roles, recipe_yaml=yaml)
    chief = tasks.tasks[0]
    tasks.await_path(chief, tmp_path / "run" / "metrics.jsonl")
    tasks.processes[chief].send_signal(signal.SIGTERM)
    ended = tasks.finish()
    match = re.search(r"ended after step (\d+)", ended[chief].err)
    assert match
    step = int(match[1])
    (saved,) = (tmp_path / "project" / "kept").glob("step-*")
    assert int(saved.name[5:]) == step
    assert set(codes(ended).values()) == {143}
    again = train(roles, recipe_yaml=yaml, arguments=("--set", f"train.max_steps={step + 8}"))
    assert codes(again.finish()) == dict.fromkeys(again.tasks, 0), again.outputs()
    assert f"(step {step})" in again.result_of(chief).err


@pytest.mark.rotates(5)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_sigterm_ends_a_chief_whose_only_worker_is_lost(mode, train, tmp_path):
    yaml = RECIPE_YAML.replace("epochs: 2", "epochs: 100000") % KEPT.replace("10", "1000000")
    tasks = train(PS, recipe_yaml=f"{yaml}updates: {{mode: {mode}}}\n")
    tasks.await_path("chief:0", tmp_path / "run" / "metrics.jsonl")
    tasks.processes["worker:0"].send_signal(signal.SIGKILL)
    tasks.processes["worker:0"].wait(TIMEOUT)
    tasks.processes["chief:0"].send_signal(signal.SIGTERM)
    ended = tasks.finish()
    assert ended["chief:0"].code == 143, ended["chief:0"].err
    if mode == "async":
        (saved,) = (tmp_path / "project" / "kept").glob("step-*")
        assert int(saved.name[5:]) > 0
    else:
        assert re.search(r"SIGTERM.* worker:0 is lost", ended["chief:0"].err)


@pytest.mark.rotates(5, 3)
@pytest.mark.parametrize("updates", ["{mode: async}", "{mode: sync}", "{mode: bounded, staleness: 2}"])
def test_a_chief_whose_ps_is_lost_names_it(updates, train, tmp_path):
    yaml = RECIPE_YAML.replace("epochs: 2", "epochs: 100000") % f"updates: {updates}\n"
    tasks = train(PS, recipe_yaml=yaml)
    tasks.await_path("chief:0", tmp_path / "run" / "metrics.jsonl")
    tasks.processes["ps:0"].kill()
    ended = tasks.finish()
    assert codes(ended) == {"chief:0": 1, "worker:0": 143, "ps:0": -9}, tasks.outputs()
    assert codes_in(ended["chief:0"].err) == ["task-lost"]
    assert re.search(r"task-lost.* ps:0", ended["chief:0"].err)
    assert [re.findall(r"\w+:0 serves at", ended[task].err) for task in ("ps:0", "worker:0")] == [
        ["ps:0 serves at"],
        ["worker:0 serves at"],
    ]


TRACEBACK = "Traceback (most recent call last)"
OWN = "my own mistake"
MISTAKE = f"raise KeyError({OWN!r})"
DATASET = "    numbers = np.random"
SLICES = "from_tensor_slices((x, y))"
LAYER = f"class Mine(keras.layers.Layer):\n    def call(self, x):\n        {MISTAKE}\n\n\ndef model("
CALLBACKS = f"""
class Mine(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        {MISTAKE}


def callbacks(params):
    return [Mine()]
"""
USERS = {
    "model": RECIPE.replace("    network = ", f"    {MISTAKE}\n    network = "),
    "dataset": RECIPE.replace(DATASET, f"    {MISTAKE}\n{DATASET}"),
    "dataset on one worker": RECIPE.replace(DATASET, f"    if shard.worker == 1: {MISTAKE}\n{DATASET}"),
    "call": RECIPE.replace("def model(", LAYER).replace('keras.layers.Dense(16, "relu")', "Mine()"),
    "on_epoch_end": RECIPE + CALLBACKS,
}


@pytest.mark.rotates(5)
@pytest.mark.parametrize("name", USERS)
def test_the_users_own_error_comes_out_once_as_a_traceback_of_the_users_code(name, train, tmp_path):
    tasks = train(PS | {"worker": 2}, module=USERS[name])
    ended = tasks.finish()
    err = ended["chief:0"].err
    assert codes(ended) == {"chief:0": 1, "worker:0": 143, "worker:1": 143, "ps:0": 143}
    assert codes_in(ended["ps:0"].err) == ["chief-lost"]
    assert err.count(TRACEBACK) == 1, err
    assert err.count("KeyError: ") == 1, err
    assert "my own mistake" in err
    assert f"in {name.split()[0]}\n" in err
    assert "tfdist_cli" not in err.split("Traceback")[1], err


def test_an_error_in_a_function_of_the_data_on_a_worker(train):
    mapped = f"{SLICES}.map(lambda a, b: (tf.ensure_shape(tf.py_function(refuse, [a], tf.float32), [8]), b))"
    module = RECIPE.replace(SLICES, mapped).replace(
        "def model(", "def refuse(a):\n    raise ValueError('my own mistake')\n\n\ndef model("
    )
    ended = train(PS | {"worker": 2}, module=module).finish()
    assert ended["chief:0"].code == 1
    err = ended["chief:0"].err
    assert err.count(TRACEBACK) == 1, err
    assert err.count("my own mistake") == 2, "the line and the message"
    assert "in refuse\n" in err
    assert err.splitlines()[-1] == f"ValueError: {OWN}"
    assert "tensorflow/python" not in err


def test_data_that_ends_early_names_the_worker(train):
    yaml = RECIPE_YAML.replace("epochs: 2", "epochs: 2, repeat: false") % ""
    ended = train(PS | {"worker": 2}, recipe_yaml=yaml).finish()
    assert ended["chief:0"].code == 1
    assert codes_in(ended["chief:0"].err) == ["data-ended-early"]
    assert re.search(r"worker:[01]", ended["chief:0"].err)
    assert "Traceback" not in ended["chief:0"].err


@pytest.mark.rotates(5)
@pytest.mark.parametrize("roles", [PS | {"worker": 2}, {"worker": 2}], ids=["parameter_server", "mirrored"])
def test_a_task_that_never_starts_is_named(roles, train):
    tasks = train(roles, tasks=["worker:0"] if "ps" not in roles else ["chief:0", "ps:0", "worker:0"],
                  env={"TFDIST_START_TIMEOUT": "8"})  # fmt: skip
    ended = tasks.finish()
    waiting = ended["chief:0" if "ps" in roles else "worker:0"]
    assert waiting.code == 124, tasks.outputs()
    (address,) = [address for task, address in tasks.addresses.items() if str(task) == "worker:1"]
    assert codes_in(waiting.err) == ["start-timeout"]
    assert f"worker:1 at {address}" in waiting.err
    assert "hint: " in waiting.err
    assert "Traceback" not in waiting.err


@pytest.mark.rotates(5)
@pytest.mark.parametrize("role", ["worker", "ps"])
def test_a_server_whose_chief_never_starts_reports_so(role, train):
    ended = train(PS, tasks=[f"{role}:0"], env={"TFDIST_START_TIMEOUT": "5"}).finish()
    assert ended[f"{role}:0"].code == 124
    assert codes_in(ended[f"{role}:0"].err) == ["start-timeout"]
    assert "chief:0 at " in ended[f"{role}:0"].err


@pytest.mark.rotates(5)
@pytest.mark.parametrize(("roles", "task"), [(PS, "ps:0"), (PS, "chief:0"), ({"worker": 2}, "worker:1")])
def test_a_port_that_another_program_has_is_named(roles, task, train):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        tasks = train(roles, taken={task: port})
        assert tasks.processes[task].wait(TIMEOUT) == 1, tasks.outputs()
        ended = tasks.result_of(task)
    assert codes_in(ended.err) == ["port-in-use"], ended.err
    assert f"{task} cannot serve" in ended.err
    assert f"127.0.0.1:{port}" in ended.err
    assert "Traceback" not in ended.err


def test_a_recipe_needs_no_cluster(train, tmp_path):
    folder = project(tmp_path / "project", recipe_yaml=RECIPE_YAML % KEPT)
    config = {"cluster": {"worker": ["127.0.0.1:2222"]}, "task": {"type": "worker", "index": 0}}
    argv = (*ROLE, "--recipe", str(folder / "recipe.yaml"), "--run-dir", str(tmp_path / "run"))
    ended = alone(folder, argv, env={"TF_CONFIG": json.dumps(config)}, fresh=True)
    assert ended.code == 0, ended.err
    assert lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 64
