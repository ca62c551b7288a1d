"""The costs measured last."""

from benchmarks.scale.model import Costs

COMMAND = "python -m benchmarks.scale --measure"
MEASURED = "2 cores (x86_64), tensorflow-cpu 2.21.0, keras 3.15.1"
COSTS = Costs(
    chief=0.5,
    ps=1.0,
    ps_per_server=0.5,
    worker=3.0,
    worker_per_server=0.5,
    chief_idle=0.1,
    ps_idle=1.0,
    worker_idle=1.0,
    launcher=0.5,
)
