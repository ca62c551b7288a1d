"""Directories of runs that nobody has trained, for what reads them."""

import json
from datetime import datetime, timedelta, timezone

BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


class RecordedRun:
    """Writes the files of a run.

    Args:
        path: its directory.
        tasks: the names of its tasks.
    """

    def __init__(self, path, tasks=("chief:0", "worker:0", "ps:0")):
        self.path = path
        path.mkdir(parents=True)
        plan = {"name": "digits", "strategy": "parameter_server", "tasks": [{"task": task} for task in tasks]}
        (path / "plan.json").write_text(json.dumps(plan))
        (path / "launcher.lock").write_text("")
        self.settings(epochs=3)
        self._launched_at = 0.0

    def settings(self, **train):
        (self.path / "cluster.yaml").write_text("name: digits\nlauncher: {kind: local}\nrun_dir: /somewhere\n")
        (self.path / "recipe.yaml").write_text(json.dumps({"module": "digits", "train": train}))

    def launch(self, at=0.0, **provenance):
        self._launched_at = at
        self.happened(0.0, "launch", **provenance)

    def happened(self, seconds, event, **fields):
        self._add("events.jsonl", seconds, seconds=float(seconds), attempt=1, event=event, **fields)

    def trained(self, seconds, step, *, done=True, split="train", values=None, **fields):
        fields |= {"split": split, "step": step, "epoch": 1, "epoch_done": done, "values": values or {"loss": 1 / step}}
        self._add("metrics.jsonl", seconds, **fields)

    def used(self, seconds, **tasks):
        self._add("resources.jsonl", seconds, tasks={name.replace("_", ":"): usage for name, usage in tasks.items()})

    def ended(self, **result):
        (self.path / "result.json").write_text(json.dumps({"exit_code": 0, **result}))

    def _add(self, name, at, /, **line):
        time = (BEGAN + timedelta(seconds=self._launched_at + at)).isoformat()
        with (self.path / name).open("a") as file:
            file.write(json.dumps({"time": time, **line}) + "\n")


def trained_run(path, *, epochs=3, loss=0.5):
    """A run of two workers, one of which was lost and started again."""
    run = RecordedRun(path, ("chief:0", "worker:0", "worker:1", "ps:0"))
    run.settings(epochs=epochs)
    run.launch(commit="0123456789abcdef", modified=True, tfdist="0.1.0", python="3.11.7", host="node")
    for task in ("chief:0", "worker:0", "worker:1", "ps:0"):
        run.happened(1, "started", task=task, pid=2**22 + 1)
        run.happened(2, "versions", task=task, tensorflow="2.21.0", keras="3.15.1", python="3.11.7")
        run.happened(3, "state", task=task, state="training" if task == "chief:0" else "serving")
    run.happened(5, "exited", task="worker:1", code=-9, status="lost", cause="killed by SIGKILL")
    run.happened(5, "loss", task="worker:1", cause="killed by SIGKILL", restarts="the task", step=40)
    run.happened(6, "started", task="worker:1", pid=2**22 + 2)
    run.happened(7, "checkpoint", task="chief:0", step=60, path="checkpoints/step-60")
    for epoch in range(1, epochs + 1):
        workers = {f"worker:{index}": {"staleness_mean": 0.5 * index, "dropped": index} for index in (0, 1)}
        rates = {"worker:0": 10.0, "worker:1": 11.0}
        values = {"loss": loss / epoch, "accuracy": 1 - 0.1 / epoch}
        run.trained(
            4.0 + epoch,
            20 * epoch,
            values=values,
            steps_per_second=21.0,
            worker_steps_per_second=rates,
            workers=workers,
        )
        run.trained(4.1 + epoch, 20 * epoch, split="test", done=False, values={"loss": loss})
        run.used(
            4.0 + epoch, chief_0={"cpu": 0.5, "memory": 4e8, "sent": 1e6, "received": 2e6, "gpus": {"0": [80, 1e9]}}
        )
    run.happened(9, "exited", task="chief:0", code=0, status="done", cause="exit code 0")
    run.happened(10, "phase", phase="ended", cause="chief:0: exit code 0", **{"from": "running"})
    workers = {"worker:0": {"steps": 30, "examples": 300, "share": 0.5, "steps_per_second": 10.0}}
    tasks = [{"task": "chief:0", "status": "done", "code": 0, "seconds": 9.0, "restarts": 0}]
    run.ended(
        step=20 * epochs,
        examples=600,
        training_seconds=5.0,
        metrics={"loss": loss / epochs},
        workers=workers,
        tasks=tasks,
    )
    return run
