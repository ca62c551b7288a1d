"""The part of MLflow's interface that tfdist uses, in memory. Its names and limits are those of MLflow 3.17."""

import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

VALID = re.compile(r"[\w./: -]+")


@dataclass(frozen=True)
class Metric:
    key: str
    value: float
    timestamp: int
    step: int


@dataclass(frozen=True)
class Param:
    key: str
    value: str


@dataclass(frozen=True)
class RunTag:
    key: str
    value: str


class MlflowClient:
    """A client of one server: all instances share the runs."""

    runs: dict[str, SimpleNamespace] = {}  # noqa: RUF012
    experiments: dict[str, str] = {}  # noqa: RUF012

    def get_experiment_by_name(self, name):
        found = self.experiments.get(name)
        return SimpleNamespace(experiment_id=found, name=name) if found else None

    def create_experiment(self, name):
        return self.experiments.setdefault(name, str(len(self.experiments)))

    def create_run(self, experiment_id, *, run_name):
        run_id = f"run{len(self.runs)}"
        info = SimpleNamespace(run_id=run_id, experiment_id=experiment_id, run_name=run_name, status="RUNNING")
        data = SimpleNamespace(params={}, tags={}, metrics={})
        self.runs[info.run_id] = SimpleNamespace(info=info, data=data, history=defaultdict(list))
        return self.runs[info.run_id]

    def get_run(self, run_id):
        return self.runs[run_id]

    def update_run(self, run_id, *, status):
        self.runs[run_id].info.status = status

    def set_terminated(self, run_id, status):
        self.runs[run_id].info.status = status

    def log_batch(self, run_id, metrics=(), params=(), tags=()):
        run = self.runs[run_id]
        assert len(metrics) <= 1000
        assert len(params) <= 100
        assert len(tags) <= 100
        assert all(VALID.fullmatch(each.key) for each in (*metrics, *params, *tags))
        for param in params:
            if run.data.params.setdefault(param.key, param.value) != param.value:
                raise ValueError(f"Changing param values is not allowed: {param.key}")
        run.data.tags |= {tag.key: tag.value for tag in tags}
        for metric in metrics:
            run.history[metric.key].append(metric)
            run.data.metrics[metric.key] = metric.value

    def get_metric_history(self, run_id, key):
        return self.runs[run_id].history[key]


def install(monkeypatch):
    """Lets `import mlflow` find this module."""
    MlflowClient.runs, MlflowClient.experiments = {}, {}
    fake, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    vars(fake).update(MlflowClient=MlflowClient)
    vars(entities).update(Metric=Metric, Param=Param, RunTag=RunTag)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.delitem(sys.modules, "tfdist_cli.tracking.trackers.mlflow", raising=False)
