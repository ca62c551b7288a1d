"""The templates of a new project: a cluster file, and a recipe or a program that trains handwritten digits."""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from tfdist_cli.init.files import Files, schema_comment, schemas
from tfdist_cli.spec.strategies import STRATEGIES, Strategy

CLUSTER, RECIPE, MODULE, PROGRAM = "cluster.yaml", "recipe.yaml", "recipe.py", "train.py"


@dataclass(frozen=True)
class Project:
    """What the user chooses.

    Args:
        name: the cluster's name, with which its runs begin.
        strategy: how the tasks train together.
        workers: the number of workers.
        ps: the number of parameter servers.
    """

    name: str
    strategy: Strategy = "parameter_server"
    workers: int = 2
    ps: int = 1

    @property
    def roles(self) -> dict[str, str]:
        """The roles of the cluster and their settings, as YAML."""
        traits = STRATEGIES[self.strategy]
        if traits.staged:
            return {"chief": "{}", "worker": _replicas(self.workers)}
        if traits.has_ps:
            return {"chief": "{}", "ps": _replicas(self.ps), "worker": _replicas(self.workers)}
        return {"worker": _replicas(self.workers)} if traits.together else {"chief": "{}"}

    def cluster_file(self, *, launched: str, recipe: str | None = None) -> str:
        """Returns the cluster file.

        Args:
            launched: the arguments of `tfdist launch`, for a comment.
            recipe: the recipe file that the cluster trains.
        """
        lines = [
            schema_comment("cluster"),
            f"# Start it with: tfdist launch {launched}\n",
            f"name: {_quoted(self.name)}\n",
            f"strategy: {self.strategy}\n",
            "roles:\n",
            *(f"  {role}: {settings}\n" for role, settings in self.roles.items()),
            *([f"recipe: {recipe}\n"] if recipe else []),
        ]
        return "".join(lines)


def _quoted(name: str) -> str:
    """Returns a name as YAML takes it for text: not for a number, or true."""
    return name if name[:1].isalpha() and yaml.safe_load(name) == name else f'"{name}"'


def recipe_files(project: Project) -> Files:
    """Returns a cluster, a recipe and its module."""
    cluster = project.cluster_file(launched=CLUSTER, recipe=RECIPE)
    recipe = schema_comment("recipe") + _RECIPE
    return {CLUSTER: cluster, RECIPE: recipe, MODULE: _MODULE, **schemas("cluster", "recipe")}


def program_files(project: Project) -> Files:
    """Returns a cluster and a program."""
    cluster = project.cluster_file(launched=f"{CLUSTER} -- python {PROGRAM}")
    return {CLUSTER: cluster, PROGRAM: _PROGRAM, **schemas("cluster")}


def script_files(project: Project, name: str, program: str) -> Files:
    """Returns a cluster and the program that a script was converted to."""
    cluster = project.cluster_file(launched=f"{CLUSTER} -- python {name}")
    return {CLUSTER: cluster, name: program, **schemas("cluster")}


def _replicas(count: int) -> str:
    return f"{{replicas: {count}}}"


_RECIPE = """\
# What to train: the functions of recipe.py, with these parameters, for so long.
module: recipe
params: {hidden: [128, 128], learning_rate: 0.002}
train: {epochs: 5, batch_size: 32}
checkpoint: {every_seconds: 60}
evaluate: {split: test}
export: {format: keras}
"""

_MODULE = '''\
"""A model of handwritten digits. Replace `model` and `dataset` by your own."""

import keras
import tensorflow as tf

from tfdist_cli.datasets import digits


def model(params):
    """Returns the compiled model; `params` are those of recipe.yaml."""
    classifier = keras.Sequential([keras.Input((digits.PIXELS,))])
    for units in params["hidden"]:
        classifier.add(keras.layers.Dense(units, activation="relu"))
    classifier.add(keras.layers.Dense(digits.CLASSES))
    classifier.compile(
        optimizer=keras.optimizers.Adam(params["learning_rate"]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return classifier


def dataset(params, split, shard):
    """Returns single examples (x, y) of a split: tfdist batches and shuffles them. Each worker reads its own shard."""
    x, y = digits.load(split)
    return tf.data.Dataset.from_tensor_slices((x, y)).shard(shard.count, shard.index)
'''

_PROGRAM = '''\
"""Trains a model of handwritten digits on the cluster of this task; in one process without a cluster."""

import keras

import tfdist_cli as tfdist
from tfdist_cli.datasets import digits

with tfdist.scope():  # ps and workers serve the chief here: the code below runs where the training is driven
    model = keras.Sequential(
        [
            keras.Input((digits.PIXELS,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(digits.CLASSES),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.002),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

history = tfdist.fit(
    model,
    digits.load("train"),
    epochs=5,
    batch_size=32,
    validation_data=digits.load("test"),
)

if tfdist.is_chief():
    print({name: round(values[-1], 4) for name, values in history.history.items()})
    tfdist.export(model, tfdist.run_dir() / "model.keras", format="keras")
'''
