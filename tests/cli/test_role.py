"""`tfdist role`: the task it becomes, and what it says when it cannot be one."""

import json
import os
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.codes import codes_in
from tests.support.ports import GIVEN_PORT
from tfdist_cli.cli import role as module
from tfdist_cli.plan.machine import Machine
from tfdist_cli.protocol.environment import UPLOADER, Environment
from tfdist_cli.run_storage import chief
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.storage.remote import RemoteFolder

pytestmark = pytest.mark.tensorflow


@pytest.fixture(autouse=True)
def _own_environment(tmp_path, monkeypatch):
    """What a task sets in its environment is gone after the test."""
    monkeypatch.chdir(tmp_path)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TF_CONFIG", "TFDIST_"))}
    for name in ("http_proxy", "https_proxy", "no_proxy", "NO_PROXY", "no_grpc_proxy"):
        kept.pop(name, None)
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(kept)
    yield
    os.environ.clear()
    os.environ.update(before)


@dataclass
class Began:
    """What a call of `tfdist role` has began.

    Args:
        recipe: what the task trains, where it is this process.
        argv: the program that took its place.
        env: that program's environment, or this process's own.
    """

    recipe: object = None
    argv: list | None = None
    env: dict | None = None
    cores: list = field(default_factory=list)

    @property
    def environment(self):
        return Environment.read(self.env)


@pytest.fixture
def began(monkeypatch):
    """Takes note of what is began, and starts nothing."""
    seen = Began()

    def run_task(recipe):
        seen.recipe, seen.env = recipe, dict(os.environ)
        return 0

    def leave(code):
        raise SystemExit(code)

    def execvpe(file, argv, env):
        if "/" not in file and file != "python":
            raise FileNotFoundError(2, "No such file or directory")
        seen.argv, seen.env = argv, dict(env)
        raise SystemExit(0)

    monkeypatch.setattr(module, "run_task", run_task)
    monkeypatch.setattr(module, "exit_now", leave)
    monkeypatch.setattr(module, "bind", lambda _, cores: seen.cores.append(tuple(cores)))
    monkeypatch.setattr(os, "execvpe", execvpe)
    return seen


AGAIN = [sys.executable, "-m", "tfdist_cli", "role", "--task"]


def tf_config(role, index=0, **cluster):
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})


PS = {"chief": ["127.0.0.1:3001"], "worker": ["127.0.0.1:3002"], "ps": ["127.0.0.1:3003"]}


def test_a_task_of_a_file(tfdist, cluster_file, began, tmp_path):
    assert tfdist("role", "--task", "worker:1", "-c", cluster_file, "-r", "digits.yaml", "-s", "name=x").code == 0
    files = ["--cluster", str(cluster_file), "--recipe", "digits.yaml"]
    assert began.argv == [*AGAIN, "worker:1", *files, "--planned", "--set=name=x"]
    environment = began.environment
    assert (environment.task, environment.strategy) == (TaskId("worker", 1), "parameter_server")
    assert {str(task): str(address) for task, address in environment.addresses.items()} == {
        "chief:0": "127.0.0.1:2222",
        "worker:0": "127.0.0.1:2223",
        "worker:1": "127.0.0.1:2224",
        "ps:0": f"127.0.0.1:{GIVEN_PORT}",
    }
    assert environment.run_dir == tmp_path / "runs" / "x"
    assert environment.run_dir.is_dir()
    assert environment.run_dir.stat().st_mode & 0o077 == 0


def test_a_worker_beside_a_ps_stays_on_its_cores(tfdist, cluster_file, began, monkeypatch):
    monkeypatch.setattr(Machine, "here", lambda: Machine(4, core_ids=(0, 2, 1, 3)))
    elastic = ("-s", "roles.worker={replicas: 2, max: 3}")
    for task in ("worker:0", "worker:1", "worker:2", "ps:0"):
        assert tfdist("role", "--task", task, "-c", cluster_file, "-r", "digits.yaml", *elastic).code == 0
    assert began.cores == [(0, 2), (1, 3), (), ()], "one that joins takes no cores from the others"
    tf_config("worker", chief=["127.0.0.1:3001"], worker=["127.0.0.1:3002", "127.0.0.1:3004"], ps=["127.0.0.1:3003"])
    assert tfdist("role").code == 0
    assert began.cores[-1] == (), "a scheduler that sets TF_CONFIG gives cores to tasks"


def test_a_worker_that_joins(tfdist, tmp_path, began):
    path = tmp_path / "elastic.yaml"
    roles = "{chief: {}, worker: {replicas: 1, max: 4}, ps: {hosts: ['localhost:2300']}}"
    path.write_text(f"strategy: parameter_server\nroles: {roles}\n")
    assert tfdist("role", "--task", "worker:2", "--cluster", path).code == 0
    environment = began.environment
    assert environment.task == TaskId("worker", 2)
    assert [task.index for task in environment.addresses if task.role == "worker"] == [0, 1, 2]
    assert str(environment.addresses[environment.task]) == "127.0.0.1:2225"
    assert (str(environment.join_address), environment.max_workers) == ("127.0.0.1:2227", 4)
    assert tfdist("role", "--task", "chief", "--cluster", path).code == 0
    assert str(began.environment.join_address) == "127.0.0.1:2227"
    result = tfdist("role", "--task", "worker:4", "--cluster", path)
    assert (result.code, codes_in(result.err)) == (2, ["task-above-max"])


def test_a_planned_task_trusts_its_environment(tfdist, cluster_file, began, tmp_path):
    """The launcher has narrowed what the task sees: to plan again would share that out once more."""
    tf_config("worker", **PS)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "5", "TFDIST_RUN_DIR": str(tmp_path / "run"), "no_proxy": "x"}
    before = dict(os.environ)
    result = tfdist("role", "--task", "worker:0", "-c", cluster_file, "-r", "digits.yaml", "--planned")
    assert (result.code, result.err) == (0, "")
    assert began.recipe.module == "digits"
    assert began.env == before
    assert tfdist("role", "--planned", "--", "python", "train.py").code == 0
    assert (began.argv, began.env) == (["python", "train.py"], before)


@pytest.mark.parametrize("role", ["ps", "worker", "chief", "evaluator"])
def test_a_task_of_tf_config_needs_no_option(role, tfdist, began):
    tf_config(role, **PS)
    assert tfdist("role").code == 0
    assert began.argv == [*AGAIN, f"{role}:0", "--planned"]
    assert began.environment.task == TaskId(role)
    assert json.loads(began.env["TF_CONFIG"])["cluster"] == PS


@pytest.mark.parametrize(
    ("cluster", "role"),
    [
        ({"worker": ["a:1", "b:1"]}, "worker"),
        ({"worker": ["a:1", "b:1"]}, "evaluator"),
        ({"chief": ["a:1"], "worker": ["b:1"], "evaluator": ["c:1"]}, "evaluator"),
        ({"worker": ["a:1"]}, "worker"),
        ({"chief": ["a:1"]}, "chief"),
    ],
)
def test_every_cluster_that_trains_is_one(cluster, role, tfdist, began, cluster_file):
    tf_config(role, **cluster)
    result = tfdist("role", "-r", "digits.yaml", "--set", "train.epochs=3")
    assert (result.code, result.err) == (0, "")
    assert began.argv == [*AGAIN, f"{role}:0", "--recipe", "digits.yaml", "--planned", "--set=train.epochs=3"]


def test_what_a_scheduler_has_set_stays(tfdist, began, tmp_path):
    tf_config("worker", **PS)
    os.environ |= {"TF_NUM_INTRAOP_THREADS": "7", "TFDIST_RUN_DIR": str(tmp_path / "given"), "no_proxy": "else.where"}
    os.environ |= {"CUDA_VISIBLE_DEVICES": "3,5", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    assert tfdist("role").code == 0
    assert began.env["TF_NUM_INTRAOP_THREADS"] == "7"
    assert (began.env["CUDA_VISIBLE_DEVICES"], began.env["TFDIST_GPUS"]) == ("3,5", "2")
    assert began.env["GLIBC_TUNABLES"].endswith(":glibc.malloc.hugetlb=0")
    assert began.environment.run_dir == tmp_path / "given"
    assert began.env["no_proxy"].startswith("else.where,127.0.0.1")
    tf_config("ps", **PS)
    assert tfdist("role").code == 0
    assert began.env["CUDA_VISIBLE_DEVICES"] == "-1"
    assert "TFDIST_GPUS" not in began.env


@pytest.mark.parametrize(
    ("launcher", "asked", "gpus"),
    [
        ("local", {}, ("3", "GPU-5")),
        ("local", {"gpus": 1}, ("3", "GPU-5")),
        ("slurm", {}, ("3", "GPU-5")),
        ("kubernetes", {"gpus": ["GPU-5"]}, ("GPU-5", "GPU-5")),
    ],
)
def test_by_hand_a_task_is_planned_for_its_own_machine(launcher, asked, gpus, tfdist, began, tmp_path):
    os.environ["CUDA_VISIBLE_DEVICES"] = "3,GPU-5"
    roles = {"worker": {"replicas": 2, **asked}}
    text = {"strategy": "multi_worker_mirrored", "launcher": launcher, "roles": roles}
    (tmp_path / "two.yaml").write_text(json.dumps(text))
    for index, gpu in enumerate(gpus):
        assert tfdist("role", "-c", "two.yaml", "--task", f"worker:{index}", "--", "python").code == 0
        assert began.env["CUDA_VISIBLE_DEVICES"] == gpu
        assert "HOME" not in began.env or began.env["HOME"] == os.environ["HOME"]


def test_an_option_counts_more_than_the_environment(tfdist, began, tmp_path):
    tf_config("worker", **PS)
    os.environ |= {"TFDIST_RUN_DIR": str(tmp_path / "given"), "TFDIST_START_TIMEOUT": "9"}
    assert tfdist("role", "--run-dir", tmp_path / "option", "--start-timeout", "4").code == 0
    assert began.environment.run_dir == tmp_path / "option"
    assert began.environment.start_timeout == 4
    assert not (tmp_path / "given").exists()


def test_a_command_takes_the_tasks_place(tfdist, began):
    tf_config("chief", **PS)
    assert tfdist("role", "--", "python", "train.py", "--lr", "0.1").code == 0
    assert began.argv == ["python", "train.py", "--lr", "0.1"]
    assert began.env["TFDIST_STRATEGY"] == "parameter_server"


STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURMD_NODENAME": "n1",
    "SLURM_CPUS_PER_TASK": "2",
}


@pytest.mark.parametrize(
    ("roles", "slurm", "gpus"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "2,3"}, ("-1", "2", "3", "-1")),  # a node's GPUs, shared
        ({}, {}, ("-1", "-1", "-1", "-1")),
        ({}, {"CUDA_VISIBLE_DEVICES": "3", "SLURM_GPUS_PER_TASK": "1"}, ("-1", "3", "3", "-1")),  # each has its own
        ({}, {"CUDA_VISIBLE_DEVICES": "GPU-3", "SLURM_GPU_BIND": "per_task:1"}, ("-1", "GPU-3", "GPU-3", "-1")),
        ({}, {"CUDA_VISIBLE_DEVICES": "1", "SLURMD_TRES_BIND": "gpu:per_task:1"}, ("-1", "1", "1", "-1")),
        ({}, {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPU_BIND": "verbose,closest"}, ("-1", "0", "1", "-1")),
        ({"worker": 1}, {"CUDA_VISIBLE_DEVICES": "0"}, ("-1", "0", "0", "-1")),
        ({"worker": 0}, {"CUDA_VISIBLE_DEVICES": "0,1"}, ("-1", "-1", "-1", "-1")),
    ],
)
def test_in_a_step_a_task_has_what_slurm_gives(roles, slurm, gpus, tfdist, began, cluster_file, monkeypatch):
    occupied = []
    monkeypatch.setattr(module, "fork_task", lambda *arguments, decides, joins: occupied.append((*arguments, decides)))
    asked = {"chief": {}, "worker": {"replicas": 2}, "ps": {}}
    for role, number in roles.items():
        asked[role] |= {"gpus": number}
    Path("step.yaml").write_text(json.dumps({"strategy": "parameter_server", "roles": asked}))
    os.environ |= STEP | slurm
    for number, gpu in enumerate(gpus):
        os.environ["SLURM_PROCID"] = str(number)
        assert tfdist("role", "-c", "step.yaml", "-r", "digits.yaml").code == 0
        assert (began.env["CUDA_VISIBLE_DEVICES"], began.env["TF_NUM_INTRAOP_THREADS"]) == (gpu, "2")
        assert began.argv[3:6] == ["role", "--task", str(occupied[-1][0])]
        assert occupied[-1][2]["env"].items() <= began.env.items()
    assert [decides for *_, decides in occupied] == [True, False, False, False]


ADDED = {
    "strategy": "parameter_server",
    "launcher": "slurm",
    "roles": {"chief": {}, "ps": {}, "worker": {"replicas": 1, "max": 4}},
}


@pytest.mark.parametrize("task", ["worker:0", "worker:2"], ids=["comes_back", "is_new"])
@pytest.mark.parametrize("attempt", ["", "2"])
def test_a_task_that_is_added_to_a_job_has_a_free_port_and_the_addresses_of_the_job(
    attempt, task, tfdist, began, cluster_file, monkeypatch
):
    occupied = []
    monkeypatch.setattr(module, "fork_task", lambda task, *_, decides, joins: occupied.append((task, decides, joins)))
    Path("added.yaml").write_text(json.dumps(ADDED))
    os.environ |= STEP | {"SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "3"}
    assert tfdist("role", "-c", "added.yaml", "-r", "digits.yaml", "--run-dir", "run").code == 0
    of_chief = json.loads(began.env["TF_CONFIG"])["cluster"], began.env["TFDIST_JOIN_ADDRESS"]
    there = {"SLURM_JOB_ID": "17", "SLURMD_NODENAME": "n2"} | ({"TFDIST_ATTEMPT": attempt} if attempt else {})
    os.environ |= there
    assert tfdist("role", "--task", task, "-c", "added.yaml", "-r", "digits.yaml", "--run-dir", "run").code == 0
    cluster = json.loads(began.env["TF_CONFIG"])["cluster"]
    worker = cluster["worker"].pop()
    assert {role: cluster[role] for role in ("chief", "ps")} == {role: of_chief[0][role] for role in ("chief", "ps")}
    assert cluster["worker"][:1] == (of_chief[0]["worker"] if task == "worker:2" else [])
    assert worker.startswith("n2:")
    port = worker.partition(":")[2]
    assert port not in str(of_chief)
    assert (began.env["TFDIST_JOIN_ADDRESS"], began.env["TFDIST_MAX_WORKERS"]) == (of_chief[1], "4")
    assert [(str(own), *how) for own, *how in occupied[1:]] == ([(task, False, True)] if attempt else [])


def test_a_task_without_a_job_to_join(tfdist, began, cluster_file):
    Path("added.yaml").write_text(json.dumps(ADDED))
    os.environ |= STEP
    result = tfdist("role", "--task", "worker:2", "-c", "added.yaml", "-r", "digits.yaml", "--run-dir", "absent")
    expect(result, "slurm-job-not-found", "worker:2", "absent/slurm_addresses.json", "--run-dir RUN")


def test_a_step_without_the_gpus_that_were_asked_for(tfdist, began, tmp_path, cluster_file):
    roles = {"worker": {"replicas": 4, "gpus": 2}}
    (tmp_path / "step.yaml").write_text(json.dumps({"strategy": "multi_worker_mirrored", "roles": roles}))
    os.environ |= STEP | {"SLURM_PROCID": "1", "CUDA_VISIBLE_DEVICES": "0"}
    result = tfdist("role", "-c", "step.yaml", "-r", "digits.yaml")
    expect(result, "gpus-not-assigned", "worker:1", "srun --gpus-per-task=2")


def expect(result, code, *texts):
    assert result.code == 2
    assert codes_in(result.err) == [code]
    assert "hint: " in result.err
    assert "Traceback" not in result.err
    for text in texts:
        assert text in " ".join(result.err.split())


def test_nothing_says_which_cluster(tfdist, began):
    expect(tfdist("role"), "no-cluster")


def test_nothing_says_which_task(tfdist, began, cluster_file):
    expect(tfdist("role", "-c", cluster_file), "no-task")


@pytest.mark.parametrize("task", ["worker:7", "evaluator", "boss", "worker:x"])
def test_a_task_that_the_cluster_does_not_have(task, tfdist, began, cluster_file):
    expect(
        tfdist("role", "-c", cluster_file, "--task", task), "unknown-task", task, "chief:0, worker:0, worker:1, ps:0"
    )


def test_a_task_that_is_not_tf_configs(tfdist, began):
    tf_config("ps", **PS)
    expect(tfdist("role", "--task", "worker"), "task-differs-from-tf-config", "ps:0", "worker")


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"cluster": {"master": ["a:1"]}, "task": {"type": "master", "index": 0}}']
)
def test_a_tf_config_that_cannot_be_read(text, tfdist, began):
    os.environ["TF_CONFIG"] = text
    expect(tfdist("role"), "invalid-tf-config")


def test_a_tf_config_of_no_cluster_that_trains(tfdist, began):
    tf_config("ps", ps=["a:1"])
    expect(tfdist("role"), "invalid-tf-config", "parameter_server needs a chief")


def test_a_run_directory_that_cannot_be_made(tfdist, began, tmp_path):
    tf_config("ps", **PS)
    (tmp_path / "file").write_text("")
    expect(tfdist("role", "--run-dir", tmp_path / "file" / "run"), "run-dir-not-writable", "Not a directory")


def test_a_command_that_is_not_there(tfdist, began):
    tf_config("ps", **PS)
    expect(tfdist("role", "--", "no-such-program-here"), "program-not-executable", "'no-such-program-here'")


def test_a_recipe_that_is_not_there(tfdist, began, tmp_path):
    tf_config("chief", **PS)
    result = tfdist("role", "-r", tmp_path / "none.yaml")
    assert result.code == 2
    assert "none.yaml" in result.err
    assert not Path("runs").exists()


@pytest.mark.parametrize("planned", [(), ("--planned",)])
def test_a_run_directory_in_a_bucket(planned, tfdist, cluster_file, began, tmp_path):
    os.environ["TFDIST_RUN_DIR"] = "gs://bucket/run"
    result = tfdist("role", "--task", "worker:0", "-c", cluster_file, *planned, "--", "python")
    assert (result.code, codes_in(result.err)) == (2, ["unsupported-scheme"])
    assert began.argv is None
    assert not list(tmp_path.glob("gs:*"))


def test_planned_without_a_plan(tfdist, began, tmp_path):
    expect(tfdist("role", "--planned"), "not-planned", "TF_CONFIG", "--planned")
    tf_config("ps", **PS)
    expect(tfdist("role", "--planned"), "not-planned", "TFDIST_RUN_DIR")
    os.environ["TFDIST_RUN_DIR"] = str(tmp_path)
    expect(tfdist("role", "--planned", "--run-dir", "x"), "run-dir-twice")
    expect(tfdist("role", "--planned", "--task", "worker:0"), "task-differs-from-tf-config", "ps:0")
    expect(tfdist("role", "--planned", "--task", "boss"), "invalid-task", "boss")
    assert began == Began()


@pytest.mark.parametrize("seconds", ["0", "-3", "nan"])
def test_a_timeout_that_is_none(seconds, tfdist, began):
    tf_config("ps", **PS)
    expect(tfdist("role", "--start-timeout", seconds), "invalid-environment-variable", seconds)


def test_a_task_reads_its_secrets_unless_it_has_been_given_them(tfdist, tmp_path, began):
    (tmp_path / "key").write_text("from the file\n")
    (tmp_path / "secret.yaml").write_text(
        "strategy: single\nroles: {chief: {secrets: {KEY: {file: key}, TOKEN: {file: nowhere}}}}\n"
    )
    assert "roles.chief.secrets.TOKEN: " in tfdist("role", "--task", "chief", "-c", "secret.yaml").err
    os.environ["TOKEN"] = "from a scheduler"
    assert tfdist("role", "--task", "chief", "-c", "secret.yaml").code == 0
    assert (began.env["KEY"], began.env["TOKEN"]) == ("from the file", "from a scheduler")
    assert began.env["TFDIST_SECRETS"] == "KEY,TOKEN"


URL = "s3://bucket/runs/digits"
CHECKPOINTS = "module: digits\ncheckpoint: {every_steps: 10}\nexport: {}\n"


def test_a_run_with_an_address(tfdist, cluster_file, began, tmp_path):
    """Each task is told the address. Its own folder is on this machine."""
    given = ("role", "--task", "ps:0", "-c", cluster_file, "--run-dir", URL)
    assert tfdist(*given).code == 0
    assert began.env["TFDIST_RUN_URL"] == URL
    assert began.environment.run_dir == tmp_path / "runs" / "digits"
    assert tfdist(*given, "--", "python", "train.py").code == 0
    assert began.argv[-4:] == ["--planned", "--", "python", "train.py"]
    os.environ["TFDIST_RUN_DIR"] = str(tmp_path / "disk")
    assert tfdist(*given).code == 0
    assert began.environment.run_dir == tmp_path / "disk"
    assert tfdist("role", "--task", "ps:0", "-c", cluster_file, "-s", "run_dir=s3://bucket/runs").code == 0
    assert "TFDIST_RUN_URL" not in began.env, "the environment has chosen a folder"
    del os.environ["TFDIST_RUN_DIR"]
    assert tfdist("role", "--task", "ps:0", "-c", cluster_file, "-s", "run_dir=s3://bucket/runs").code == 0
    assert began.env["TFDIST_RUN_URL"].startswith("s3://bucket/runs/")


def test_only_the_chief_uploads_and_all_save_there(tfdist, began, tmp_path, monkeypatch):
    seen = []

    def run_chief(*arguments):
        seen.append(arguments)
        return 0

    monkeypatch.setattr(chief, "run_chief", run_chief)
    (tmp_path / "recipe.yaml").write_text(CHECKPOINTS)
    os.environ |= {"TFDIST_RUN_DIR": str(tmp_path / "run"), "TFDIST_RUN_URL": URL}
    planned = ("role", "-r", "recipe.yaml", "--planned")
    for role, uploads in {"worker": False, "evaluator": False, "chief": True}.items():
        tf_config(role, **PS)
        began.recipe = None
        assert tfdist(*planned).code == 0
        assert (bool(seen), began.recipe is None) == (uploads, uploads), role
        recipe = seen[0][2] if uploads else began.recipe
        assert (recipe.checkpoint.dir, recipe.export.upload) == (f"{URL}/checkpoints", f"{URL}/export")
    url, environment, _, _ = seen.pop()
    assert (url, environment.run_dir) == (URL, tmp_path / "run")
    os.environ[UPLOADER] = str(os.getppid())
    assert tfdist(*planned).code == 0
    assert not seen, "this is the task of that process"
    assert began.recipe.checkpoint.dir == f"{URL}/checkpoints"


def test_a_recipe_in_a_bucket_is_fetched_once(tfdist, cluster_file, began, tmp_path):
    """The program that the task becomes uses the content that was fetched, whatever is there by then."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    remote = RemoteFolder(Url(f"memory://{uuid.uuid4()}/recipes"))
    remote.write("digits.yaml", CHECKPOINTS.encode())
    option = ("-r", f"{remote.url}/digits.yaml")
    assert tfdist("role", "--task", "ps:0", "-c", cluster_file, *option).code == 0
    content = began.env["TFDIST_RECIPE_SHA256"]
    remote.write("digits.yaml", b"module: others")
    os.environ |= {name: began.env[name] for name in ("TF_CONFIG", "TFDIST_RUN_DIR", "TFDIST_RECIPE_SHA256")}
    assert tfdist("role", *option, "--planned").code == 0
    assert (began.recipe.module, began.recipe.source.sha256) == ("digits", content)


def test_a_run_that_the_cluster_file_names_keeps_its_recipe(tfdist, cluster_file, began, tmp_path):
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    remote = RemoteFolder(Url(f"memory://{uuid.uuid4()}"))
    remote.write("recipes/digits.yaml", CHECKPOINTS.encode())
    recipe, runs = f"{remote.url}/recipes/digits.yaml", f"run_dir={remote.url}/runs"
    given = ("role", "--task", "ps:0", "-c", cluster_file, "-r", recipe, "-s", runs)
    assert tfdist(*given).code == 0
    content = began.env["TFDIST_RECIPE_SHA256"]
    source = f"source: {{address: '{remote.url}/recipes/digits.yaml', sha256: {content}}}"
    run = Url(began.env["TFDIST_RUN_URL"]).name
    remote.write(f"runs/{run}/recipe.yaml", f"module: digits\n{source}\n".encode())
    remote.write("recipes/digits.yaml", b"module: others")
    result = tfdist(*given)
    assert (result.code, began.env["TFDIST_RECIPE_SHA256"]) == (0, content)
    assert "warning[recipe-changed]" in result.err
