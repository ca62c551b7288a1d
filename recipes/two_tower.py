"""A two-tower model of users and items, whose tables are those of one layer of KerasRS.

After Covington et al., Deep Neural Networks for YouTube Recommendations (2016), with clicks as labels.
"""

import functools

import keras
import tensorflow as tf
from ctr import Comparison

from tfdist_cli.datasets import impressions
from tfdist_cli.errors import UsageError

try:
    import keras_rs
except ModuleNotFoundError:
    raise UsageError(
        "the recipe two_tower uses KerasRS, which is not installed",
        code="no-keras-rs",
        hint="pip install 'tfdist-cli[recommenders]'",
    ) from None


def model(params):
    user, item = (keras.Input((), dtype="int64", name=name) for name in ("user", "item"))
    history = keras.Input((impressions.HISTORY,), dtype="int64", name="history")
    inputs = {"user": user, "item": item, "history": history}
    users, items = (table(params, name) for name in ("users", "items"))
    tables = {"user": users, "item": items, "history": items}  # an item has the same row in a history
    vectors = keras_rs.layers.DistributedEmbedding(
        {
            name: keras_rs.layers.FeatureConfig(name, tables[name], each.shape, (None, params["dim"]))
            for name, each in inputs.items()
        }
    )(inputs)
    towers = [
        tower(params, keras.layers.Concatenate()([vectors["user"], vectors["history"]])),
        tower(params, vectors["item"]),
    ]
    recommender = keras.Model(inputs, keras.layers.Dot(axes=1)(towers))
    recommender.compile(
        optimizer=keras.optimizers.Adam(params["learning_rate"]),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )
    return recommender


def table(params, name):
    return keras_rs.layers.TableConfig(name, params[name], params["dim"], combiner="mean")


def tower(params, x):
    for units in params["hidden"]:
        x = keras.layers.Dense(units, activation="relu")(x)
    return keras.layers.Dense(params["dim"])(x)


def dataset(params, split, shard):
    made = generated(params, split)
    own = slice(shard.index, None, shard.count)
    x = {"user": made.users[own], "item": made.items[own], "history": made.histories[own]}
    return tf.data.Dataset.from_tensor_slices((x, made.labels[own]))


def callbacks(params):
    return [Comparison(generated(params, "test").best_auc)] if "test" in params["examples"] else []


def generated(params, split):
    return _generated(params["examples"].get(split, 0), split, params["users"], params["items"])


@functools.cache
def _generated(count, split, users, items):
    return impressions.generate(count, split, users=users, items=items)
