"""Each launcher's tasks: the real environment is the planned one, and each task sees its own GPUs and no other's.

Setting CUDA_VISIBLE_DEVICES shows that on a machine without a GPU, too. Every test prints how many tasks it started,
and how many of them saw wrong GPUs: `pytest -rP tests/cluster/test_task_environment.py | grep wrong`.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.support.lab import containers
from tests.support.lab.hosts import missing as no_hosts
from tests.support.lab.slurm import slurm  # noqa: F401 - a fixture
from tests.support.launching import RECIPE, RECIPE_YAML, finish, project, start
from tests.support.tasks import program
from tfdist_cli.launch.kubernetes.launcher import KubernetesLauncher
from tfdist_cli.launch.kubernetes.manifests import manifests
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import make_plan
from tfdist_cli.plan.tf_config import tf_config_json
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
SHOW = (sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))")
MIRRORED, PS = "multi_worker_mirrored", "parameter_server"
PROXIES = {"no_proxy": "internal", "http_proxy": "http://127.0.0.1:9"}


def workers(count, **asked):
    return {"worker": {"replicas": count, **asked}}


def servers(count, **asked):
    return {"chief": {}, "ps": {"replicas": 2}, **workers(count, **asked), "evaluator": {}}


@dataclass
class Case:
    """A cluster, and what its tasks are to see.

    Args:
        visible: CUDA_VISIBLE_DEVICES of the launcher; None for none.
        roles: the cluster's.
        sees: CUDA_VISIBLE_DEVICES of the tasks that see GPUs, in the tasks' order; all others see none.
        settings: more of the cluster file.
    """

    visible: str | None
    roles: dict
    sees: list = field(default_factory=list)
    settings: dict = field(default_factory=dict)

    def write(self, folder, **settings):
        strategy = PS if "ps" in self.roles else MIRRORED
        text = {"strategy": strategy, "roles": self.roles, **self.settings, **settings}
        folder.mkdir(exist_ok=True)
        (folder / "cluster.yaml").write_text(json.dumps(text))
        return folder


FREE = [
    Case("0,1", workers(2), ["0", "1"]),
    Case("3,5", workers(2), ["3", "5"]),
    Case("GPU-3c8,GPU-51f", workers(2, gpus=1), ["GPU-3c8", "GPU-51f"]),
    Case("MIG-1,MIG-2", servers(2), ["MIG-1", "MIG-2"]),
    Case("0,1", servers(4, gpus=[1]), ["1"] * 4),
    Case("0,1", workers(4)),
    Case("3,5", workers(4, gpus=["GPU-3c8"]) | {"evaluator": {"gpus": 1}}, [*["GPU-3c8"] * 4, "3"]),
    Case("0,1,2", servers(2, gpus=1) | {"evaluator": {"gpus": [0]}}, ["1", "2", "0"]),
    Case("3,5", workers(2, gpus="all"), ["3,5", "3,5"]),
    Case("0,1,2,3", workers(4, gpus=1), ["0", "1", "2", "3"]),
    Case("0,1", workers(2, gpus=0)),
    Case("-1", servers(2)),
]
FREE[6].visible = "3,5,GPU-3c8"


@pytest.fixture(scope="module")
def count():
    """Adds up what each launcher has shown."""
    return {}


@pytest.fixture
def check(count, request):
    """Compares the real environment of each task with what was planned for it, and what it is to see."""
    launches, tasks, wrong = [], [], []

    def compare(case, plan, real, renamed=()):
        launches.append(case)
        given = {each["task"]: each for each in plan["tasks"]}
        sees = iter(case.sees)
        for task, each in given.items():
            env = real[task]
            planned = {name: value for name, value in each["env"].items() if name not in renamed}
            expected = next(sees) if each["gpus"] else "-1"
            tasks.append(task)
            if env.get("CUDA_VISIBLE_DEVICES") != expected or (task.startswith("ps") and expected != "-1"):
                wrong.append((case, task, expected, env.get("CUDA_VISIBLE_DEVICES")))
            different = {name: (value, env.get(name)) for name, value in planned.items() if env.get(name) != value}
            assert not different, (case, task)
        assert list(sees) == [], (case, given)

    yield compare
    name = request.node.name.removeprefix("test_").partition("_")[0]
    print(f"{name}: {len(tasks)} tasks in {len(launches)} launches, {len(wrong)} saw wrong GPUs")
    assert not wrong


def launched(folder, *arguments, env=None, code=0):
    """Runs the program in every task of a cluster; the plan of the run, and each task's environment."""
    done = finish(start(folder, "--run-dir", "run", *arguments, "--", *program("environment.py"), env=env), 200)
    assert done.code == code, done.stderr
    run = folder / "run"
    plan = json.loads((run / "plan.json").read_text())
    return plan, {each["task"]: last_of(run, each["task"]) for each in plan["tasks"]}


def last_of(run, task):
    """The environment of a task in its last attempt."""
    logs = sorted(run.glob(f"attempt_*/{task.replace(':', '-')}/stdout.log"))
    return json.loads(logs[-1].read_text().splitlines()[-1])


def shell(case):
    return PROXIES | {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7", "CUDA_VISIBLE_DEVICES": case.visible}


def test_local_tasks(check, tmp_path):
    for number, case in enumerate(FREE):
        plan, real = launched(case.write(tmp_path / str(number)), env=shell(case))
        check(case, plan, real)
        for env in real.values():
            assert env["no_proxy"].startswith("internal,")
            assert env["GLIBC_TUNABLES"].endswith(":glibc.malloc.tcache_count=7")


def test_local_tasks_that_are_started_again(check, tmp_path):
    case = Case("3,5", workers(2, gpus=1, restart={"policy": "job", "max": 1}), ["3", "5"])
    folder = case.write(tmp_path / "again")
    done = finish(start(folder, "--run-dir", "run", "--", *program("environment.py", "once"), env=shell(case)))
    assert done.code == 0, done.stderr
    plan = json.loads((folder / "run" / "plan.json").read_text())
    check(case, plan, {each["task"]: last_of(folder / "run", each["task"]) for each in plan["tasks"]})
    assert len(list((folder / "run").glob("attempt_2/*/stdout.log"))) == 2


TELLS = f"import json, os\nprint(json.dumps(dict(os.environ)), flush=True)\n{RECIPE}"


def test_local_tasks_of_a_recipe(check, tmp_path):
    """They run `tfdist role` as forks of one process, which did not know the devices of each."""
    case = Case("3,5", workers(2, gpus=1) | {"evaluator": {}}, ["3", "5"])
    folder = project(tmp_path / "recipe", recipe=f"{TELLS}\n\nraise SystemExit(0)\n", recipe_yaml=RECIPE_YAML)
    case.write(folder, recipe="recipe.yaml")
    done = finish(start(folder, "--run-dir", "run", env=shell(case)))
    assert done.code == 0, done.stderr
    plan = json.loads((folder / "run" / "plan.json").read_text())
    check(case, plan, {each["task"]: last_of(folder / "run", each["task"]) for each in plan["tasks"]})


def test_a_task_without_its_gpus_reports_so_once(tmp_path):
    folder = project(tmp_path / "ps", recipe=TELLS, recipe_yaml=RECIPE_YAML.replace("epochs: 4", "epochs: 1"))
    Case("0,1", servers(2)).write(folder, recipe="recipe.yaml")
    done = finish(start(folder, "--run-dir", "run", env={"CUDA_VISIBLE_DEVICES": "0,1"}), 150)
    assert done.code == 0, done.stderr
    line = re.compile(r"^(worker:\d) needs 1 GPU, .+$", re.MULTILINE)
    for log in (folder / "run" / "attempt_1").glob("*/stderr.log"):
        task_name = log.parent.name.replace("-", ":")
        assert line.findall(log.read_text()) == ([task_name] if task_name.startswith("worker") else []), task_name
    assert done.stderr.count("TensorFlow sees none") == 2
    shown = subprocess.run(
        [sys.executable, "-m", "tfdist_cli", "status", "run"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    rows = {line.split()[0]: line for line in shown.splitlines() if ":" in line.split(maxsplit=1)[0]}
    assert ["GPU 0" in rows["worker:0"], "GPU 1" in rows["worker:1"], "GPU" in rows["ps:0"]] == [True, True, False]


HOST = """#!/bin/sh
export CUDA_VISIBLE_DEVICES={visible} no_proxy=internal http_proxy=http://127.0.0.1:9
exec {python} "$@"
"""
ON_HOSTS = [
    Case("3,5|GPU-1a,GPU-2b", workers(4), ["3", "GPU-1a", "5", "GPU-2b"]),
    Case("0,1|MIG-7,MIG-8", servers(4, gpus=1), ["0", "MIG-7", "1", "MIG-8"]),
    Case("0,1|3,5", workers(2, gpus="all"), ["0,1", "3,5"]),
    Case("0,1|0,1", workers(2, gpus=[1]) | {"evaluator": {"gpus": 0}}, ["1", "1"]),
]


@pytest.mark.skipif(bool(no_hosts()), reason=no_hosts())
@pytest.mark.rotates(5)
@pytest.mark.parametrize("case", ON_HOSTS, ids=lambda case: case.visible)
def test_ssh_tasks(case, check, lab, tmp_path):
    """Several on each host, whose GPUs and proxies are its own."""
    name = f"environment{ON_HOSTS.index(case)}"
    folder = lab.here / name
    hosts = []
    for host, visible in zip(lab.hosts, case.visible.split("|"), strict=False):
        python = lab.config.parent / f"{host.name}-{name}-python"
        python.write_text(HOST.format(visible=visible, python=sys.executable))
        python.chmod(0o755)
        hosts.append({"address": host.name, "python": str(python)})
    case.write(folder, launcher="ssh", hosts=hosts, ssh={"config": str(lab.config)})
    plan, real = launched(folder, env={"no_proxy": "of the launcher"})
    check(case, plan, real, renamed=("TFDIST_RUN_DIR",))
    assert {env["no_proxy"].partition(",")[0] for env in real.values()} == {"internal"}
    by_role = dict.fromkeys(env["TFDIST_RUN_DIR"] for env in real.values())
    assert all(".tfdist/runs/run/" in path for path in by_role)


TWO_A_NODE = "--ntasks-per-node=2"
IN_JOBS = [
    Case(None, servers(2, gpus=1) | {"evaluator": {"gpus": 0}}, ["0", "1"]),
    Case(None, workers(4), ["0", "1", "0", "1"], {"slurm": {"gres": "gpu:2", "nodes": 2, "extra": [TWO_A_NODE]}}),
]


def test_slurm_tasks(check, slurm, tmp_path, monkeypatch):  # noqa: F811 - the fixture above
    """What Slurm gives to a step, or to all of its tasks on a node; each task's share is in the run's directory."""
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for number, case in enumerate(IN_JOBS):
        folder = case.write(tmp_path / str(number), launcher="slurm")
        plan, real = launched(folder, "--start-timeout", 120, env={**os.environ, **PROXIES})
        run = folder / "run" / "attempt_1"
        plan["tasks"] = [
            json.loads((run / each["task"].replace(":", "-") / "task.json").read_text()) for each in plan["tasks"]
        ]
        check(case, plan, real)
        status = [sys.executable, "-m", "tfdist_cli", "status", "--json", str(folder / "run")]
        reported = json.loads(subprocess.run(status, capture_output=True, check=True).stdout)["tasks"]
        assert {each["task"]: each["gpus"] for each in reported} == {
            each["task"]: each["gpus"] for each in plan["tasks"]
        }


CDI = Path("/var/run/cdi")
IN_CONTAINERS = [
    Case("3,5", workers(2) | {"evaluator": {"gpus": 0}}, ["0", "0"]),
    Case("GPU-3c8,GPU-51f,3,5", servers(2, gpus=1) | {"evaluator": {"gpus": [3, 5]}}, ["0", "0", "0,1"]),
    Case("3,5", workers(2, gpus="all"), [None, None]),
]


@pytest.fixture
def devices():
    """GPUs that an engine can give to a container: none is real, and each shows by a variable that it is there."""
    path = CDI / "nvidia.json"
    if os.geteuid() or path.exists():
        pytest.skip(f"only root can pretend that there are GPUs, and only where {path} does not name real ones")
    CDI.mkdir(exist_ok=True)
    names = ("3", "5", "GPU-3c8", "GPU-51f", "all")
    given = [{"name": name, "containerEdits": {"env": [f"DEVICE_{name.replace('-', '_')}=1"]}} for name in names]
    path.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": given}))
    yield
    path.unlink()


def test_compose_tasks(check, engine, devices, tmp_path):
    """CUDA counts a container's GPUs from 0, whichever devices it was given."""
    for number, case in enumerate(IN_CONTAINERS):
        settings = {"launcher": "compose", "compose": {"image": containers.IMAGE, "volumes": containers.volumes()}}
        plan, real = launched(case.write(tmp_path / str(number), **settings), env={**os.environ, **shell(case)})
        check(case, plan, real)
        for each in plan["tasks"]:
            seen = {name for name in real[each["task"]] if name.startswith("DEVICE_")}
            assert seen == {f"DEVICE_{gpu.replace('-', '_')}" for gpu in each["gpus"]}


IN_PODS = [
    Case(None, workers(2, gpus=1) | {"evaluator": {"gpus": 0}}, ["0", "0"]),
    Case(None, servers(2, gpus=2, cpus=3), ["0,1"] * 2),
]


@pytest.mark.rotates(5)
@pytest.mark.parametrize("kind", ["jobset", "tfjob", "pods"])  # those of `plain` are the last ones
def test_kubernetes_tasks(check, kind, tmp_path):
    """What a kubelet, and a TFJob's operator, make of the manifests: `tfdist role --planned` with this environment."""
    for case in IN_PODS:
        strategy = PS if "ps" in case.roles else MIRRORED
        spec = {"strategy": strategy, "launcher": "kubernetes", "roles": case.roles, "kubernetes": {"kind": kind}}
        cluster = Cluster.model_validate(spec)
        addresses = KubernetesLauncher().preview_addresses(cluster)
        plan = make_plan(cluster, None, addresses=addresses, run_dir=tmp_path, machine=Machine(64), command=SHOW)
        began = {}
        for task, container in _containers(manifests(plan)):
            index = task.index if task else None
            for own in [task] if task else [each.task for each in plan.tasks if _role(each.task) == container["role"]]:
                env = {"TF_CONFIG": tf_config_json(addresses, own)} if kind == "tfjob" else {}
                env |= _filled_in(container["env"], own.index if index is None else index)
                env |= {"TFDIST_RUN_DIR": str(tmp_path), "PATH": f"{Path(sys.prefix) / 'bin'}:/usr/bin:/bin"}
                argv = [_fill(word, env) for word in container["command"]]
                began[str(own)] = subprocess.Popen(
                    argv, env=env | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
        real = {}
        for name, process in began.items():
            out, err = process.communicate(timeout=100)
            assert process.returncode == 0, err
            real[name] = json.loads(out)
        check(case, plan.as_json(), real)


def _role(task):
    return task.role.replace("_", "-")


def _containers(objects):
    """Each container with the task that it is for; for None all tasks of the role."""
    for each in yaml.safe_load_all(yaml.safe_dump_all(objects)):
        spec = each.get("spec", {})
        for job in spec.get("replicatedJobs", ()):
            yield None, job["template"]["spec"]["template"]["spec"]["containers"][0] | {"role": job["name"]}
        for role, replica in spec.get("tfReplicaSpecs", {}).items():
            yield None, replica["template"]["spec"]["containers"][0] | {"role": role.lower()}
        pod = spec["template"]["spec"] if each["kind"] == "Job" else spec if each["kind"] == "Pod" else None
        if pod:
            role, _, index = pod["hostname"].rpartition("-")
            yield TaskId.parse(f"{role.replace('-', '_')}:{index}"), pod["containers"][0]


def _filled_in(variables, index):
    """The variables as a kubelet sets them: a name is filled in that stands before."""
    env = {}
    for each in variables:
        field_path = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        if field_path:
            assert field_path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        env[each["name"]] = str(index) if field_path else _fill(each["value"], env)
    return env


def _fill(text, env):
    return re.sub(r"\$\$|\$\((\w+)\)", lambda found: env.get(found[1], found[0]) if found[1] else "$", text)
