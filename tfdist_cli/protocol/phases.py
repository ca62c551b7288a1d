"""The phases of a step, by the names under which a training tells how long they took."""

from __future__ import annotations

WATCH = "TFDIST_PHASES"
"""The environment variable by which `tfdist bench` has the tasks of a run take the time of each phase: 1."""
PHASES = ("wait", "data", "pull", "compute", "push", "all_reduce", "update")
"""Waiting for the chief's leave, for the batch, for the parameters; forward and backward pass; the gradients' way to
every ps, or through the all-reduce; the update."""
TRAFFIC = ("pulled", "pushed", "reduced")
"""Bytes of parameters and rows from the ps, of gradients and row numbers to them, of gradients in the all-reduce."""
COLUMNS = (*PHASES, *TRAFFIC)
"""What is counted of a step, in seconds and bytes."""
