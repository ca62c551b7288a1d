"""The task of a barrier stage."""

import sys
from types import SimpleNamespace

from tfdist_cli.launch.slots.handshake import OPTIONS, Caller
from tfdist_cli.launch.spark import barrier


def test_a_slot_runs_its_agent_without_a_barrier_of_spark(monkeypatch):
    """With one, Spark 3.5 leaves a thread that keeps spark-submit from exiting."""
    infos = [SimpleNamespace(address="10.0.0.1:40001"), SimpleNamespace(address="10.0.0.2:40002")]
    context = SimpleNamespace(partitionId=lambda: 1, getTaskInfos=lambda: infos)  # nothing else is asked of it
    module = SimpleNamespace(BarrierTaskContext=SimpleNamespace(get=lambda: context))
    monkeypatch.setitem(sys.modules, "pyspark", module)
    monkeypatch.setenv(OPTIONS, "{}")
    started = []
    monkeypatch.setattr(barrier, "run_agent", lambda *arguments: started.append(arguments))
    assert list(barrier.run_slot(("h", 1), "s", iter([7]))) == []
    assert started == [(("h", 1), "s", Caller(7, "10.0.0.2"))]
