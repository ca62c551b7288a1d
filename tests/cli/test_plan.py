"""`tfdist plan`."""

import json
import sys

from tfdist_cli.resources import Machine


def test_a_row_for_each_task(tfdist, cluster_file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    lines = tfdist("plan", cluster_file, "--recipe", "digits.yaml").out.splitlines()
    assert lines[0].strip() == f"cluster: parameter_server, in {cluster_file.parent / 'runs' / 'cluster'}"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[0] for row in rows] == ["chief:0", "worker:0", "worker:1", "ps:0"]
    assert rows[0][1] == "127.0.0.1 (free port)"
    assert rows[3][1:4] == ["127.0.0.1:2300", str(Machine.here().cores), "none"]
    assert rows[1][4].startswith(f"{sys.executable} -m tfdist_cli role --task worker:0 --cluster ")


def test_a_program(tfdist, cluster_file):
    result = tfdist("plan", cluster_file, "--set", "roles.worker.replicas=1", "--", "python", "my train.py", "--json")
    assert result.out.count("python 'my train.py'") == 3


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
    assert [cell.strip() for cell in worker.split("│")[3:6]] == ["3", "2 GiB", "1 (50%)"]
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
