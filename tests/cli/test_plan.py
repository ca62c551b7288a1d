"""`tfdist plan`."""

import json
import sys

import pytest

from tests.support.ports import GIVEN_PORT
from tfdist_cli.cli.plan import _cores
from tfdist_cli.plan.machine import Machine


def test_a_row_for_each_task(tfdist, cluster_file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    lines = tfdist("plan", cluster_file, "--recipe", "digits.yaml").out.splitlines()
    assert lines[0] == f"cluster: parameter_server, in {cluster_file.parent / 'runs' / 'cluster'}"
    own = Machine.here().core_ids[: Machine.here().cores // 2]  # those of each worker
    assert lines[1].split() == ["task", "address", "threads", *["cores"] * bool(own), "GPUs"]
    rows = [line.split() for line in lines[3:7]]
    assert [row[0] for row in rows] == ["chief:0", "worker:0", "worker:1", "ps:0"]
    assert rows[0][1:4] == ["127.0.0.1", "(free", "port)"]
    assert rows[1][4:-1] == [str(len(own) or 1), *[_cores(own)] * bool(own)]
    assert rows[3][1:] == [f"127.0.0.1:{GIVEN_PORT}", str(Machine.here().cores), "none"]
    assert lines[8] == "each task runs"
    assert lines[9].startswith(f"  {sys.executable} -m tfdist_cli role --task ROLE:INDEX --cluster ")


GPUS = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-1932f937-d72c-4106-c12f-20bd9faed9f6")


def test_it_fits_80_columns(tfdist, cluster_file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(GPUS))
    host = "a-machine-with-a-long-name.some-department.of-a-university.example.org:20022"
    role = f"{{hosts: ['{host}', '10.85.125.105:2222'], gpus: 2, gpu_memory: 4096MiB, memory: 2GiB}}"
    name = "a-long-name-of-a-cluster-that-takes-half-of-a-line"
    cluster_file.write_text(f"name: {name}\nstrategy: multi_worker_mirrored\nroles: {{worker: {role}}}\n")
    lines = tfdist("plan", cluster_file, "--", "train").out.splitlines()
    table = lines[1:-3]
    assert max(map(len, table)) <= 80
    assert [line.split()[0] for line in table if "worker" in line] == ["worker:0", "worker:1"]
    assert lines[-2:] == ["each task runs", "  train"]


def test_a_program(tfdist, cluster_file):
    result = tfdist("plan", cluster_file, "--set", "roles.worker.replicas=1", "--", "python", "my train.py", "--json")
    assert result.out.endswith("each task runs\n  python 'my train.py' --json\n")


@pytest.mark.parametrize(
    ("ids", "shown"), [((), ""), ((3,), "3"), ((0, 1), "0-1"), ((0, 8, 1, 9), "0-1,8-9"), ((5, 0, 2), "0,2,5")]
)
def test_the_cores_of_a_task_are_shown_as_ranges(ids, shown):
    assert _cores(ids) == shown


def test_json(tfdist, cluster_file):
    result = tfdist("plan", cluster_file, "--json", "-s", "run_dir=out")
    plan = json.loads(result.out)
    assert plan["run_dir"] == str(cluster_file.parent / "out" / "cluster")
    assert [task["task"] for task in plan["tasks"]] == ["chief:0", "worker:0", "worker:1", "ps:0"]
    assert json.loads(plan["tasks"][2]["env"]["TF_CONFIG"])["task"] == {"type": "worker", "index": 1}


def test_what_the_file_asks_of_a_machine(tfdist, cluster_file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    wanted = "roles.worker={gpus: [1], gpu_memory: 0.5, memory: 2GiB, threads: {intra: 3}}"
    text = tfdist("plan", cluster_file, "-s", wanted).out
    worker = next(line for line in text.splitlines() if "worker:0" in line)
    assert worker.split()[-5:] == ["3", "2", "GiB", "1", "(50%)"]
    task = json.loads(tfdist("plan", cluster_file, "-s", wanted, "--json").out)["tasks"][1]
    assert {key: task[key] for key in ("memory", "gpus", "gpu_memory", "intra_op_threads", "cpus")} == {
        "memory": "2 GiB",
        "gpus": ["1"],
        "gpu_memory": 0.5,
        "intra_op_threads": 3,
        "cpus": None,
    }


def test_brackets_are_no_markup(tfdist, cluster_file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    assert "echo '[bold]x'" in tfdist("plan", cluster_file, "-s", "name='[red]x'", "--", "echo", "[bold]x").out
