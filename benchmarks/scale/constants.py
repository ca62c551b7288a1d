"""The costs that were measured last, on 2 cores (x86_64) with tensorflow-cpu 2.21.0 and Keras 3.15.1."""

from benchmarks.scale.model import Costs

COSTS = Costs(
    chief=2.153,
    ps=0.752,
    ps_per_server=0.584,
    worker=2.609,
    worker_per_server=0.162,
    chief_idle=0.0,
    ps_idle=4.97,
    worker_idle=1.06,
    launcher=0.342,
)
"""What `python -m benchmarks.scale --measure` printed."""
