"""The phases of a training step, by their names in timing reports."""

from __future__ import annotations

WATCH = "TFDIST_PHASES"
"""The environment variable with which `tfdist bench` turns the timing of phases on: 1."""
BUILD_FIRST = "TFDIST_BUILD_FIRST"
"""The environment variable with which `tfdist bench` has a training build the functions of the long run first: 1."""
PHASES = ("wait", "data", "pull", "compute", "push", "all_reduce", "update")
"""Waiting for the chief's permission, for the batch, for the parameters; forward and backward pass; sending the
gradients to every ps, or the all-reduce; the update."""
TRAFFIC = ("pulled", "pushed", "reduced")
"""Bytes of parameters and rows from the ps, of gradients and row numbers to them, of gradients in the all-reduce."""
COLUMNS = (*PHASES, *TRAFFIC)
"""The measurements of a step, in seconds and bytes."""
