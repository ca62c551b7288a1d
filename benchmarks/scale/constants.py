"""The costs that were measured last, on 2 cores (x86_64) with tensorflow-cpu 2.21.0 and Keras 3.15.1."""

from benchmarks.scale.model import Costs

COSTS = Costs(
    chief=0.114,
    ps=0.899,
    ps_per_server=0.689,
    worker=1.771,
    worker_per_server=0.288,
    chief_idle=0.453,
    ps_idle=4.55,
    worker_idle=1.19,
    launcher=0.254,
)
"""What `python -m benchmarks.scale --measure` printed."""
