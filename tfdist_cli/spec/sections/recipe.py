"""recipe.yaml: the model and the data, the length of the training, and what is saved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, model_validator

from tfdist_cli.errors import InvalidValue
from tfdist_cli.spec.export_formats import FormatName, Quantization
from tfdist_cli.spec.path_scheme import Location, Url, location
from tfdist_cli.spec.sections.model import (
    Inconsistent,
    KeyProblem,
    LocationField,
    PathField,
    Sha256,
    SpecModel,
    UrlField,
)
from tfdist_cli.spec.sections.updates import (
    Balance,
    EmbeddingRule,
    Jit,
    LearningRate,
    PlacementRule,
    ShardRule,
    Updates,
    WireType,
)
from tfdist_cli.spec.trackers import TrackerName


def _check_module(name: str) -> str:
    if name.endswith(".py") and "/" not in name:
        raise InvalidValue(f"{name!r} is a file: write the module, {name[:-3]!r}", code="module-is-file")
    if not all(part.isidentifier() and not iskeyword(part) for part in name.split(".")):
        message = f"{name!r} is not the name of a module: expected one such as 'my_model' or 'package.digits'"
        raise InvalidValue(message, code="invalid-module")
    return name


def _check_function(name: str) -> str:
    if not name.isidentifier() or iskeyword(name):
        message = f"{name!r} is not the name of a function of the module"
        raise InvalidValue(message, code="invalid-function")
    return name


def _class_number(key: object) -> object:
    """Keys of a map are words in JSON."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def _check_worker(name: str) -> str:
    if not re.fullmatch(r"worker:(0|[1-9][0-9]*)", name):
        raise InvalidValue(f"{name!r} cannot hold layers: expected a worker, such as 'worker:0'", code="unknown-task")
    return name


Count = Annotated[int, Field(ge=1)]
PlacePattern = Annotated[str, Field(min_length=1)]
WorkerName = Annotated[str, AfterValidator(_check_worker), Field(json_schema_extra={"pattern": "^worker:[0-9]+$"})]
ClassNumber = Annotated[int, BeforeValidator(_class_number), Field(ge=0)]
Share = Literal["split", "copy", "service"]
FunctionName = Annotated[str, AfterValidator(_check_function), Field(json_schema_extra={"minLength": 1})]
ModuleName = Annotated[str, AfterValidator(_check_module), Field(json_schema_extra={"minLength": 1})]


class Train(SpecModel):
    """The length of the training, and its data."""

    epochs: Count | None = None
    """Number of epochs, each of `steps_per_epoch` steps. By default 1, or as many as `max_steps` needs."""
    batch_size: Count = 32
    """Number of examples in each batch of one worker. If `dataset()` returns batches, they stay as they are."""
    steps_per_epoch: Count | Literal["auto"] = "auto"
    """Number of steps of all workers together in an epoch. `auto`: as many as it takes to show each training example
    once."""
    max_steps: Count | None = None
    """The global step at which the training stops. A resumed training counts the steps before its checkpoint, too."""
    steps_per_execution: Count | Literal["auto"] = "auto"
    """Number of steps that a worker runs between two reports to the chief. `auto`: a number that suits the strategy."""
    jit: Jit = False
    """Whether XLA compiles the forward and backward pass, and in one process the update. `auto`: measures the pass with
    and without XLA before the training, and uses the faster one."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """The seed of the weights' initial values, of shuffling and of dropout."""
    share: Share = "split"
    """The data that each worker sees. `split`: its own part. `copy`: all of it, in an order of its own. `service`:
    batches from the cluster's data workers, with each example in one batch of one worker."""
    shuffle: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Number of examples in the shuffle buffer; 0 keeps their order. `auto`: all examples, but at most 10,000. If
    `dataset()` returns batches, 0 keeps the order of a `PyDataset`'s, and other batches are never shuffled."""
    repeat: bool = True
    """Whether the data starts again when it ends. Otherwise it is an error if the data ends before the training."""
    class_weight: dict[ClassNumber, float] | None = None
    """The weight of each class, by its number, in the loss: `{"0": 1.0, "1": 4.5}`. Keys of YAML need quotes here."""
    initial_epoch: Annotated[int, Field(ge=0)] = 0
    """The epoch, counted from 0, to start with. A training that resumes from a checkpoint continues instead."""


class Checkpoint(SpecModel):
    """When and where the state of the training is saved."""

    every_steps: Count | None = None
    """Number of steps between two checkpoints."""
    every_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds between two checkpoints."""
    keep: Count = 3
    """Number of checkpoints to keep. Older ones are deleted."""
    asynchronous: Literal["auto"] | bool = "auto"
    """Whether the training continues while a checkpoint is written. Each task then needs memory for a copy of its
    variables. `auto`: only if the copy takes no more than 1 GiB."""
    full_every: Count = 1
    """Each so many-th checkpoint is full. The others write only what has changed in the tables of `DynamicEmbedding`
    layers since the checkpoint before, and all other variables. 1: all are full."""
    push_tables: LocationField | None = None
    """The folder, relative to this file or in a storage service, to which the rows of `DynamicEmbedding` tables are
    pushed after each checkpoint, for servers that follow the training. By default they are not pushed."""
    dir: LocationField | None = None
    """The folder for checkpoints, relative to this file, or in a storage service: `s3://bucket/run`, `gs://` or
    `hdfs://`. The training resumes from the newest checkpoint in it. By default a folder in the run directory."""

    @model_validator(mode="after")
    def _has_a_time(self) -> Checkpoint:
        if self.every_steps is None and self.every_seconds is None:
            message = "needs every_steps or every_seconds, the interval between two checkpoints"
            raise Inconsistent([KeyProblem((), message, code="no-checkpoint-interval")])
        return self

    @property
    def paths(self) -> dict[str, Path]:
        """The folders on disks, by their keys."""
        found = {"dir": self.dir, "push_tables": self.push_tables}
        return {key: value for key, value in found.items() if isinstance(value, Path)}


_DIRECTIONS = {
    "min": (
        *("loss", "error", "mse", "mae", "mape", "msle", "rmse", "crossentropy", "hinge", "divergence", "perplexity"),
        *("false_positives", "false_negatives"),
    ),
    "max": (
        *("acc", "auc", "precision", "recall", "f1", "fbeta", "iou", "r2", "similarity"),
        *("true_positives", "true_negatives"),
    ),
}
"""Parts of metrics' names that tell which values are better."""


class Evaluate(SpecModel):
    """How the model is evaluated on data that it is not trained on."""

    split: str = "test"
    """The `split` argument of the recipe's `dataset`."""
    validation_split: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The part of the arrays of the split `train`, such as 0.2, that the model is evaluated on instead of trained: the
    last ones. It takes the place of `split`."""
    every_epochs: Count | list[Count] | None = 1
    """Number of epochs between two evaluations by the tasks that train, which also evaluate at the end; or a list of
    the epochs, counted from 1, to evaluate after. null: only the evaluator evaluates."""
    steps: Count | Literal["auto"] = "auto"
    """Number of batches to evaluate. `auto`: the whole split."""
    monitor: str = "val_loss"
    """The metric by which the evaluator compares checkpoints: `val_loss`, or `val_` and the name of a metric."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether a lower (`min`) or a higher value of `monitor` (`max`) is better. `auto`: as the metric's name says."""
    patience: Count | None = None
    """Number of checkpoints in a row without a better `monitor` after which the training stops, at its next checkpoint.
    It needs an evaluator. By default the training does not stop early."""

    @model_validator(mode="after")
    def _mode_is_known(self) -> Evaluate:
        if self.mode == "auto" and self._direction is None:
            message = f"whether a higher {self.monitor} is better does not follow from its name: set mode to min or max"
            raise Inconsistent([KeyProblem(("monitor",), message, code="monitor-without-mode")])
        return self

    @property
    def maximizes(self) -> bool:
        """Whether a higher value of `monitor` is better."""
        return (self._direction if self.mode == "auto" else self.mode) == "max"

    @property
    def _direction(self) -> str | None:
        return next((mode for mode, parts in _DIRECTIONS.items() if any(part in self.monitor for part in parts)), None)


class Export(SpecModel):
    """The files of the trained model for programs without tfdist."""

    format: FormatName | list[FormatName] = "saved_model"
    """`saved_model` for TensorFlow and TensorFlow Serving, `keras` for `keras.saving.load_model`, `onnx`, `litert` or
    `openvino`, or a list of them. ONNX and OpenVINO need libraries: `pip install 'tfdist-cli[onnx]'` and
    `'tfdist-cli[openvino]'`."""
    versions: bool = False
    """Whether a SavedModel is written to a folder of its step, `export/serving/1200`. TensorFlow Serving, started on
    `export/serving`, serves the highest."""
    quantize: Quantization | None = None
    """`int8`: the weights of `Dense`, `EinsumDense` and `Embedding` layers take a quarter of the bytes. Activations
    keep their type. The outputs differ slightly from those of the trained model. Not for `keras`."""
    signatures: FunctionName | None = None
    """The function of the module that returns further signatures of a SavedModel: `signatures` for
    `def signatures(model)`. The model itself is the signature `serving_default`."""
    best: bool = False
    """Whether the evaluator also exports the model of the checkpoint with the best `evaluate.monitor`, each time that
    there is a better one: to `export/best` in the run directory."""
    upload: UrlField | None = None
    """The folder in a storage service, such as `s3://bucket/model`, for a copy of the files in the run directory."""

    @model_validator(mode="after")
    def _fits_the_formats(self) -> Export:
        if self.quantize and "keras" in self.formats:
            message = "the format keras has no quantized weights: choose other formats, or remove quantize"
            raise Inconsistent([KeyProblem(("quantize",), message, code="export-not-quantizable")])
        for key in ("versions", "signatures"):
            if getattr(self, key) and "saved_model" not in self.formats:
                message = f"only the format saved_model has {key}: add it, or remove {key}"
                raise Inconsistent([KeyProblem((key,), message, code=f"export-has-no-{key}")])
        return self

    @property
    def formats(self) -> tuple[FormatName, ...]:
        """Each format once, in the order of the file."""
        return tuple(dict.fromkeys([self.format] if isinstance(self.format, str) else self.format))


def services_of(recipe: Recipe) -> tuple[Url, ...]:
    """Returns the addresses in storage services that a recipe uses; its `params` may have those of data."""
    saved = recipe.checkpoint
    named = (
        saved.dir if saved else None,
        saved.push_tables if saved else None,
        recipe.export.upload if recipe.export else None,
    )
    return tuple(each for each in (*named, *_addresses(recipe.params)) if isinstance(each, Url))


def _addresses(value: JsonValue) -> Iterator[Location | None]:
    """Yields the addresses and paths among the texts of a value."""
    if isinstance(value, str):
        with suppress(InvalidValue):  # a text that looks like an address
            yield location(value)
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _addresses(each)


class RecipeSource(SpecModel):
    """A recipe that was fetched from a storage service."""

    address: UrlField
    """The address of the recipe's file."""
    sha256: Sha256
    """The SHA-256 of the files in its folder, as `sha256sum` prints them."""


class Recipe(SpecModel):
    """A Python module with `model(params)` and `dataset(params, split, shard)`, and how to train it."""

    module: ModuleName
    """The Python module: one in the folder of this file, such as `my_model` for `my_model.py`, or one that Python can
    import, such as `mypackage.recipes.digits`."""
    params: dict[str, JsonValue] = {}
    """The `params` argument of the module's functions."""
    train: Train = Train()
    """The length of the training, and the distribution of the data."""
    updates: Updates = Updates()
    """When the workers' gradients are applied to the variables on parameter servers."""
    learning_rate: LearningRate = LearningRate()
    """Changes of the optimizer's learning rate if several workers train."""
    placement: PlacementRule = "greedy"
    """The ps that holds a variable. `greedy`: the one with the fewest bytes so far. `round_robin`: each ps in turn."""
    shard: ShardRule | None = ShardRule()
    """The variables that are split over several ps; null for none."""
    stages: Count | None = None
    """The number of parts into which `model_parallel` splits the layers. By default one for each worker, or for each
    task in `place`. More workers make replicas, which divide the data."""
    balance: Balance = "bytes"
    """What these parts have about equal amounts of. `bytes`: weights. `time`: the time of the layers, which is measured
    with the first micro-batch when the training starts."""
    place: dict[PlacePattern, WorkerName] | None = None
    """The worker of each layer, for `model_parallel`: `{"encoder/*": "worker:0", "decoder/*": "worker:1"}`. A key is a
    pattern of names; a layer within another one is `outer/inner`. The first key that matches counts."""
    micro_batches: Count = 1
    """The number of parts of a batch that pass through the stages of `model_parallel` one after the other, so that the
    workers compute at the same time."""
    embeddings: EmbeddingRule | None = EmbeddingRule()
    """The `Embedding` tables of which steps read and update single rows; null for none."""
    wire: WireType = "float32"
    """The data type of parameters and gradients on the network. Variables keep their own type."""
    checkpoint: Checkpoint | None = None
    """When and where the state of the training is saved. By default it is not saved."""
    evaluate: Evaluate | None = Evaluate()
    """How the model is evaluated; null for no evaluation."""
    export: Export | None = None
    """The files of the trained model. By default there are none."""
    tracking: list[TrackerName] = []
    """The programs that keep the metrics of the run: `tensorboard`, `mlflow`, `wandb` (Weights & Biases), `csv`."""
    module_dir: PathField | None = None
    """The folder with `module`, relative to this file. By default the folder of this file."""
    source: RecipeSource | None = None
    """Where the recipe of a run is from. tfdist writes it into the run directory, for a recipe in a storage service."""

    @model_validator(mode="after")
    def _has_stages(self) -> Recipe:
        if self.place is not None:
            placed = stages_of_place(self.place)
            if self.stages is not None:
                message = "place names the worker of each layer: remove stages, or remove place"
                raise Inconsistent([KeyProblem(("stages",), message, code="stages-and-place")])
            if self.balance != "bytes":
                message = "place names the worker of each layer: remove balance, or remove place"
                raise Inconsistent([KeyProblem(("balance",), message, code="balance-and-place")])
            if sorted(set(self.place.values())) != [f"worker:{n}" for n in range(placed)]:
                message = f"place has to name worker:0 to worker:{placed - 1}, the stages of one replica, each of them"
                raise Inconsistent([KeyProblem(("place",), message, code="place-skips-task")])
        if self.train.batch_size < self.micro_batches:
            message = f"a batch of {self.train.batch_size} examples cannot be divided into {self.micro_batches} parts"
            raise Inconsistent([KeyProblem(("micro_batches",), message, code="micro-batches-do-not-fit")])
        return self

    def stage_count(self, workers: int) -> int:
        """Returns the number of stages of one replica on some workers."""
        return stages_of_place(self.place) if self.place else self.stages or workers


def stages_of_place(place: Mapping[str, str]) -> int:
    """Returns the number of stages that a map from layers to workers has."""
    return len(set(place.values()))
