"""The batch script: its text, and how bash runs it."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.slurm.launcher import SlurmLauncher
from tfdist_cli.launch.slurm.script import render_script, render_task_script
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import make_plan
from tfdist_cli.spec.loading.load import load_cluster, load_recipe
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe

PS = {"chief": {}, "ps": {}, "worker": {"replicas": 2}}
GOLDEN = """\
#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@60
#SBATCH --ntasks=4
#SBATCH --cpus-per-task=1
#SBATCH --nodes=2
#SBATCH --partition=gpu
#SBATCH --account="the lab's"
#SBATCH --time=1-12
#SBATCH --mem-per-cpu=4G

run=/shared/runs/digits
mkdir -p -m 700 -- "$run"
cat >"$run"/cluster.yaml <<'END'
name: digits
strategy: parameter_server
launcher: slurm
roles:
  chief: {}
  worker: {replicas: 2}
  ps: {}
slurm:
  partition: gpu
  account: the lab's
  time: 1-12
  nodes: 2
  extra: [--mem-per-cpu=4G]
  setup: [module load cuda]
  python: python3
recipe: recipe.yaml
END
cat >"$run"/recipe.yaml <<'END'
RECIPE
END

module load cuda

# `tfdist launch` gives the attempt and the start timeout: the tasks then write to files that it reads.
if [ -n "${1-}" ]; then export TFDIST_ATTEMPT=$(($1 + ${SLURM_RESTART_COUNT:-0})); fi
if [ -n "${2-}" ]; then export TFDIST_START_TIMEOUT=$2; fi
role=(python3 -m tfdist_cli role)
role+=(--cluster "$run"/cluster.yaml --run-dir "$run")
# Before the time limit, and before it is preempted, the training saves a checkpoint and exits with 143.
# The job is then requeued, unless it was cancelled.
trap 'signalled=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
srun --label --export=ALL --distribution=block --kill-on-bad-exit=1 --wait=0 --ntasks=4 --cpus-per-task=1 "${role[@]}" &
signalled=1
while [ -n "$signalled" ]; do signalled=; wait "$!"; code=$?; done
[ "$code" != 143 ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code\""""
HOSTILE = {
    "quote": "a'; echo foo",
    "umlaut": "Grüße an alle #1",
    "dollar": "$HOME `id` $(id) %j",
    "backslash": 'a\\ "b" \\',
    "long": "x" * 100,
}


def recipe(**given):
    return Recipe.model_validate({"module": "digits", "module_dir": Path("/shared"), **given})


SAVING = recipe(checkpoint={"every_steps": 10})


def plan_of(roles=PS, trained=SAVING, command=(), run_dir=Path("/shared/runs/digits"), **cluster):
    given = {"name": "digits", "strategy": "parameter_server", "launcher": "slurm", "roles": roles, **cluster}
    made = Cluster.model_validate(given)
    addresses = SlurmLauncher().preview_addresses(made)
    return make_plan(made, trained, addresses=addresses, run_dir=run_dir, machine=Machine(2), command=command)


def srun_of(script):
    (line,) = [line for line in script.splitlines() if line.removeprefix("exec ").startswith("srun ")]
    return line.removesuffix(" &")


def test_the_whole_script(tmp_path):
    slurm = {"partition": "gpu", "account": "the lab's", "time": "1-12", "nodes": 2, "python": "python3"}
    script = render_script(plan_of(slurm=slurm | {"extra": ["--mem-per-cpu=4G"], "setup": ["module load cuda"]}))
    before, _, rest = script.partition("recipe.yaml <<'END'\n")
    written, _, after = rest.partition("\nEND\n")
    assert f"{before}recipe.yaml <<'END'\nRECIPE\nEND\n{after}" == GOLDEN
    (tmp_path / "recipe.yaml").write_text(written)
    assert load_recipe(tmp_path / "recipe.yaml") == SAVING


def test_roles_with_different_resources_are_components_of_a_heterogeneous_job():
    roles = {
        "chief": {},
        "worker": {"replicas": 3, "cpus": 8, "gpus": 2, "memory": "12GiB"},
        "ps": {"replicas": 2},
        "evaluator": {},
    }
    script = render_script(plan_of(roles, slurm={"partition": "gpu", "python": "py"}))
    head = script.partition("\n\n")[0]
    first, workers, others = head.split("#SBATCH hetjob\n")
    assert first.endswith("#SBATCH --ntasks=1\n#SBATCH --cpus-per-task=1\n#SBATCH --partition=gpu\n")
    size = "#SBATCH --ntasks=3\n#SBATCH --cpus-per-task=8\n#SBATCH --mem-per-cpu=1536M\n#SBATCH --gpus-per-task=2\n"
    assert workers == f"{size}#SBATCH --partition=gpu\n"
    assert others == "#SBATCH --ntasks=3\n#SBATCH --cpus-per-task=1\n#SBATCH --partition=gpu"
    common = "--label --export=ALL --distribution=block --kill-on-bad-exit=1 --wait=0"
    assert srun_of(script).removeprefix("srun ").split(" : ") == [
        f'{common} --het-group=0 --ntasks=1 --cpus-per-task=1 "${{role[@]}}"',
        f'{common} --het-group=1 --ntasks=3 --cpus-per-task=8 --mem-per-cpu=1536M --gpus-per-task=2 "${{role[@]}}"',
        f'{common} --het-group=2 --ntasks=3 --cpus-per-task=1 "${{role[@]}}"',
    ]


def test_an_added_task_has_a_script_of_its_own(bash, tmp_path):
    slurm = {"partition": "gpu", "nodes": 2, "time": "1:00", "gres": "gpu:1", "extra": ["--mem-per-cpu=1G"]}
    roles = PS | {"worker": {"replicas": 3, "cpus": 4}, "evaluator": {}}
    plan = plan_of(roles, slurm=slurm | {"nodes": None, "python": "py"}, run_dir=tmp_path / "a run")
    script = render_task_script(plan, plan.tasks[3].task)
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        "--job-name=digits-worker-2", "--no-requeue", "--open-mode=append", "--signal=TERM@60", "--ntasks=1",
        "--cpus-per-task=4", "--partition=gpu", "--time=1:00", "--gres=gpu:1", "--mem-per-cpu=1G",
    ]  # fmt: skip
    code, ((program, *argv),), attempt = bash(script, "3", "60")
    assert (code, program, attempt) == (0, "srun", "3")
    role = f"py -m tfdist_cli role --task worker:2 --cluster {tmp_path}/a run/cluster.yaml --run-dir {tmp_path}/a run"
    assert " ".join(argv) == f"--label --export=ALL --ntasks=1 --cpus-per-task=4 {role}"


def test_slurm_chooses_the_gpus():
    with raises(UsageError, "gpus-chosen-by-scheduler") as caught:
        render_script(plan_of(PS | {"worker": {"gpus": [0, 2]}}))
    assert all(value in caught.value.message for value in ("worker", "[0, 2]", "Slurm"))


def test_a_number_of_nodes_is_refused_for_several_components():
    with raises(UsageError, "slurm-nodes-of-different-roles"):
        render_script(plan_of(PS | {"worker": {"cpus": 2}}, slurm={"nodes": 2}))


@pytest.mark.parametrize(
    ("strategy", "roles", "options"),
    [
        ("parameter_server", PS | {"evaluator": {}}, "--kill-on-bad-exit=1 --wait=0"),
        ("single", {"chief": {}, "evaluator": {}}, "--kill-on-bad-exit=1 --wait=0"),
        ("multi_worker_mirrored", {"worker": {"replicas": 2}}, "--kill-on-bad-exit=0 --wait=60"),
        ("multi_worker_mirrored", {"worker": {"replicas": 2}, "evaluator": {}}, "--kill-on-bad-exit=0 --wait=0"),
    ],
)
def test_srun_ends_a_step_when_the_deciding_tasks_exit(strategy, roles, options):
    assert f" {options} " in srun_of(render_script(plan_of(roles, strategy=strategy)))


@pytest.mark.parametrize(("trained", "command"), [(recipe(checkpoint=None), ()), (None, ("python", "t.py"))])
def test_a_job_without_checkpoints_is_not_requeued(trained, command):
    script = render_script(plan_of(trained=trained, command=command))
    assert "#SBATCH --no-requeue\n" in script
    assert "scontrol" not in script
    assert "USR1" not in script
    assert script.splitlines()[-1].startswith("exec srun ")


@pytest.fixture
def bash(tmp_path):
    """Runs a script with stand-ins for Slurm's programs, which record their calls."""
    fake = f"#!{sys.executable}\nimport json, os, signal, sys, time\n"
    fake += "open(os.environ['NOTES'], 'a').write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + '\\n')\n"
    fake += "open(os.environ['NOTES'], 'a').write(json.dumps(os.environ.get('TFDIST_ATTEMPT')) + '\\n')\n"
    fake += "if sys.argv[0].endswith('srun') and 'LATE' in os.environ:\n"
    fake += "    os.kill(os.getppid(), signal.SIGUSR1)\n"
    fake += "    while 'scancel' not in open(os.environ['NOTES']).read():\n        time.sleep(0.01)\n"
    fake += "sys.exit(int(os.environ['CODE']) if sys.argv[0].endswith('srun') else 0)\n"
    (tmp_path / "bin").mkdir()
    for name in ("srun", "scontrol", "scancel"):
        (tmp_path / "bin" / name).write_text(fake)
        (tmp_path / "bin" / name).chmod(0o755)

    def run(script, *arguments, code=0, **env):
        (tmp_path / "job.sh").write_text(script)
        env |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "NOTES": str(tmp_path / "notes"), "CODE": str(code)}
        env |= {"SLURM_JOB_ID": "12"}
        (tmp_path / "notes").unlink(missing_ok=True)
        done = subprocess.run(["bash", tmp_path / "job.sh", *arguments], cwd=tmp_path, env=env, check=False, timeout=20)
        notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
        return done.returncode, notes[::2], notes[1]

    return run


@pytest.mark.parametrize("name", HOSTILE)
def test_bash_keeps_every_value_literal(name, bash, tmp_path):
    text = HOSTILE[name]
    path = tmp_path / f"{text} / {text}"
    env = {"chief": {"env": {"TEXT": f"{text}\nEND\nEND_\n"}}}
    plan = plan_of(PS | env, None, ("run", text, f"{text}\n2"), path, name=text.replace("/", ""))
    code, ((program, *argv),), attempt = bash(render_script(plan))
    assert (code, program, attempt) == (0, "srun", None)
    role = argv[argv.index(sys.executable) :]
    assert role[:4] == [sys.executable, "-m", "tfdist_cli", "role"]
    assert role[4:] == ["--cluster", f"{path}/cluster.yaml", "--run-dir", str(path), "--", "run", text, f"{text}\n2"]
    assert load_cluster(path / "cluster.yaml") == plan.cluster


@pytest.mark.parametrize("name", HOSTILE)
def test_an_option_of_sbatch_is_one_word(name):
    """By sbatch's rules; tests/cluster/test_slurm.py runs sbatch itself."""
    script = render_script(plan_of(slurm={"constraint": HOSTILE[name]}))
    (line,) = [line for line in script.splitlines() if line.startswith("#SBATCH --constraint")]
    quoted = line.removeprefix("#SBATCH --constraint=")
    assert quoted == HOSTILE[name] or yaml.safe_load(quoted) == HOSTILE[name]


def test_only_an_interrupted_training_is_requeued(bash):
    script = render_script(plan_of(run_dir=Path("run")))
    assert [call[0] for call in bash(script, code=0)[1]] == ["srun"]
    assert bash(script, code=1)[0] == 1
    code, calls, _ = bash(script, code=143)
    assert code == 143
    assert calls[1:] == [["scontrol", "requeue", "12"]]


@pytest.mark.parametrize("code", [0, 138, 143])
def test_before_the_time_limit_the_tasks_get_sigterm_and_are_awaited(code, bash):
    exit_code, (_, *calls), _ = bash(render_script(plan_of(run_dir=Path("run"))), code=code, LATE="1")
    assert exit_code == code
    assert calls[0] == ["scancel", "--signal=TERM", "12"]
    assert calls[1:] == ([["scontrol", "requeue", "12"]] if code == 143 else [])


def test_tasks_killed_by_the_scripts_signal_end_the_job(bash):
    code, calls, _ = bash(render_script(plan_of(run_dir=Path("run"))), code=128 + signal.SIGUSR1)
    assert code == 138
    assert [call[0] for call in calls] == ["srun"]


def test_the_attempt_follows_from_the_launch_and_slurms_own_restarts(bash):
    script = render_script(plan_of(run_dir=Path("run")))
    assert bash(script, "3", "60")[2] == "3"
    assert bash(script, "3", "60", SLURM_RESTART_COUNT="2")[2] == "5"


def test_the_command_is_run_by_every_task():
    script = render_script(plan_of(trained=None, command=("python", "train.py", "--lr", "0.1 0.2")))
    (line,) = [line for line in script.splitlines() if line.startswith("role+=(--") and "--cluster" not in line]
    assert shlex.split(line.removeprefix("role+=(").removesuffix(")")) == [
        "--",
        "python",
        "train.py",
        "--lr",
        "0.1 0.2",
    ]
