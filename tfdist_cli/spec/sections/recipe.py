"""recipe.yaml: which model and data, for how long, and what is kept of it."""

from __future__ import annotations

from keyword import iskeyword
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, model_validator

from tfdist_cli.errors import InvalidValue
from tfdist_cli.spec.sections.model import Inconsistent, KeyProblem, PathField, SpecModel
from tfdist_cli.spec.sections.updates import (
    EmbeddingRule,
    Jit,
    LearningRate,
    PlacementRule,
    ShardRule,
    Updates,
    WireType,
)


def _check_module(name: str) -> str:
    if name.endswith(".py") and "/" not in name:
        raise InvalidValue(f"{name!r} is a file: write the module, {name[:-3]!r}", code="module-is-file")
    if not all(part.isidentifier() and not iskeyword(part) for part in name.split(".")):
        message = f"{name!r} is not the name of a module: expected one such as 'digits_mlp' or 'package.digits'"
        raise InvalidValue(message, code="invalid-module")
    return name


Count = Annotated[int, Field(ge=1)]
Share = Literal["split", "copy", "service"]
ModuleName = Annotated[str, AfterValidator(_check_module), Field(json_schema_extra={"minLength": 1})]


class Train(SpecModel):
    """How long, and on what."""

    epochs: Count | None = None
    """Passes of `steps_per_epoch` steps; by default 1, or as many as `max_steps` takes."""
    batch_size: Count = 32
    """Examples in one worker's step."""
    steps_per_epoch: Count | Literal["auto"] = "auto"
    """Steps of all workers together in an epoch; `auto`: as many as show each training example once."""
    max_steps: Count | None = None
    """Stop at this global step exactly, counted from the first step ever, checkpoints included."""
    steps_per_execution: Count | Literal["auto"] = "auto"
    """Steps a worker runs between two reports to the chief; `auto`: chosen for the strategy."""
    jit: Jit = False
    """Whether XLA compiles the forward and backward pass; `auto` tries it before the training, and takes what is
    quicker."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seeds weights, shuffling and dropout."""
    share: Share = "split"
    """What each worker sees: its own part of the data (`split`), all of it in its own order (`copy`), or what the
    cluster's data workers have ready next, each example once over all workers (`service`)."""
    shuffle: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Examples in the shuffle buffer; 0 keeps the order, `auto` takes all of them, 10,000 at most."""
    repeat: bool = True
    """Start the data again when it ends; otherwise running out of it is an error."""


class Checkpoint(SpecModel):
    """When the state of the training is saved, and where."""

    every_steps: Count | None = None
    """Save each time this many steps are done."""
    every_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Save each time this many seconds have passed."""
    keep: Count = 3
    """How many of the newest checkpoints stay."""
    asynchronous: Literal["auto"] | bool = "auto"
    """Whether training goes on while a checkpoint is written, which may take each task as much memory again as its
    variables; `auto` where that is no more than 1 GiB."""
    dir: PathField | None = None
    """The checkpoint folder, relative to this file. A launch resumes from what it finds there; by default a new folder
    in the run directory."""

    @model_validator(mode="after")
    def _has_a_time(self) -> Checkpoint:
        if self.every_steps is None and self.every_seconds is None:
            message = "needs every_steps or every_seconds, the interval between two checkpoints"
            raise Inconsistent([KeyProblem((), message, code="no-checkpoint-interval")])
        return self


class Evaluate(SpecModel):
    """How the model is scored on data it is not trained on."""

    split: str = "test"
    """The split that the recipe's `dataset` is asked for."""
    every_epochs: Count | None = 1
    """The training tasks score it after each of this many epochs and at the end; null leaves it to the evaluator."""
    steps: Count | Literal["auto"] = "auto"
    """Batches to score; `auto` takes the whole split."""


class Export(SpecModel):
    """What is written of the trained model, for programs that have no tfdist."""

    format: Literal["saved_model", "keras"] | list[Literal["saved_model", "keras"]] = "saved_model"
    """`saved_model` for TensorFlow and its servers, `keras` for `keras.saving.load_model`, or a list of both."""

    @property
    def formats(self) -> tuple[str, ...]:
        """Each format once, in the order given."""
        return tuple(dict.fromkeys([self.format] if isinstance(self.format, str) else self.format))


class Recipe(SpecModel):
    """A Python module with `model(params)` and `dataset(params, split, shard)`, and how to train it."""

    module: ModuleName
    """A module beside this file, `digits_mlp`, or an importable one, `mypackage.recipes.digits`."""
    params: dict[str, JsonValue] = {}
    """Passed to the module's functions as they stand."""
    train: Train = Train()
    """For how long it trains, and how the data is dealt out."""
    updates: Updates = Updates()
    """How the workers' gradients become updates of the variables on parameter servers."""
    learning_rate: LearningRate = LearningRate()
    """What becomes of the optimizer's learning rate where several workers train."""
    placement: PlacementRule = "greedy"
    """The ps that a variable is put on: the one with the fewest bytes (`greedy`), or the next in turn."""
    shard: ShardRule | None = ShardRule()
    """Which variables are spread over several ps; null for none."""
    embeddings: EmbeddingRule | None = EmbeddingRule()
    """Which `Embedding` tables are moved row by row; null for none."""
    wire: WireType = "float32"
    """The type in which parameters and gradients cross the network; they are kept in their own."""
    checkpoint: Checkpoint | None = None
    """When the state is saved; none by default."""
    evaluate: Evaluate | None = Evaluate()
    """How the model is scored; null leaves it out."""
    export: Export | None = None
    """What is written of the trained model; nothing by default."""
    module_dir: PathField | None = None
    """The folder that `module` is looked for in; by default this file's."""
