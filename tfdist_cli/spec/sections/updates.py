"""How gradients become updates: the rule, the learning rate, and where variables live."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tfdist_cli.spec.sections.model import Inconsistent, SpecModel

Jit = bool | Literal["auto"]
WireType = Literal["float32", "bfloat16", "float16"]
PlacementRule = Literal["greedy", "round_robin"]
_Count = Annotated[int, Field(ge=1)]

_OF_MODE = {
    "async": ("local_steps", "push_every", "delay_compensation", "prefetch"),
    "sync": ("aggregate",),
    "bounded": ("staleness",),
}
_APART = (
    ("prefetch", "push_every"),
    ("push_every", "local_steps"),
    ("delay_compensation", "local_steps"),
    ("prefetch", "local_steps"),
)


class Updates(SpecModel):
    """When a worker's gradients are applied to the variables on parameter servers."""

    mode: Literal["async", "sync", "bounded"] = "async"
    """`async`: each worker updates when it is ready; `sync`: all workers' gradients make one update; `bounded`: the
    same, but a worker may run a few steps ahead."""
    local_steps: _Count = 1
    """async: steps that a worker takes on a copy of its own, each an update by the optimizer, before the ps have what
    they changed."""
    push_every: _Count = 1
    """async: steps whose mean gradient makes one update, computed with the same parameters."""
    delay_compensation: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """async: λ of g + λ·g²·(w − w'), which makes up for what others have changed since w' was read; 0 for none."""
    prefetch: bool = False
    """async: a worker reads the parameters of its next step before it pushes this one's gradients, so that it need not
    wait for them; they are one update of its own older."""
    aggregate: _Count | None = None
    """sync: gradients that make one update; by default one of each worker. Workers beyond that are backups: the
    gradients that come too late are dropped, and counted."""
    staleness: Annotated[int, Field(ge=0, le=64)] | None = None
    """bounded: steps that a worker may be ahead of the slowest; 0 is sync."""

    @model_validator(mode="after")
    def _fits_the_mode(self) -> Updates:
        problems = [
            ((key,), f"{key} belongs to mode: {mode}, not {self.mode}")
            for mode, keys in _OF_MODE.items()
            for key in keys
            if mode != self.mode and self._chosen(key)
        ]
        if self.mode == "bounded" and self.staleness is None:
            problems.append((("staleness",), "bounded needs staleness: the steps a worker may be ahead, such as 3"))
        problems += [
            ((key,), f"{key} and {other} don't go together: choose one")
            for key, other in _APART
            if self._chosen(key) and self._chosen(other)
        ]
        if problems:
            raise Inconsistent(problems)
        return self

    @property
    def span(self) -> int:
        """async: steps that a worker takes between reading parameters and telling the ps what came of them."""
        return max(self.push_every, self.local_steps)

    def _chosen(self, key: str) -> bool:
        return bool(getattr(self, key) != type(self).model_fields[key].default)


class LearningRate(SpecModel):
    """What becomes of the optimizer's learning rate."""

    scale: Literal["none", "linear", "sqrt"] = "none"
    """By how many workers' batches make one update: times their number (`linear`), or its root (`sqrt`)."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Updates over which the rate grows to its full height: from the unscaled rate where it is scaled, else from 0."""


class EmbeddingRule(SpecModel):
    """How `Embedding` layers are trained on parameter servers."""

    min_bytes: Annotated[int, Field(ge=0)] = 2**20
    """Tables of at least so many bytes are read and updated row by row: only the rows that a batch looks up."""


class ShardRule(SpecModel):
    """Which variables are spread over several ps, along their first axis."""

    min_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    """Variables of at least so many bytes are spread."""
    max_shards: _Count | None = None
    """Over so many ps at the most; by default over all of them."""
