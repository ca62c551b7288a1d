"""Models with each of Keras's layers."""

from __future__ import annotations

import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.zoo.case import (
    CLASSES,
    ONE_UPDATE,
    Case,
    add_case,
    branches,
    case,
    classifier,
    floats,
    images,
    integers,
    labels,
    sequences,
    tokens,
    vectors,
    volumes,
    words,
)

PER_REPLICA = "each worker normalizes by its own batch"
SHUFFLED = "another order of sums"


@case(vectors)
def dense_layers():
    return branches(
        (8,),
        layers.Dense(4, "relu"),
        layers.EinsumDense("ab,bc->ac", output_shape=4, bias_axes="c"),
        layers.Activation("gelu"),
        layers.ActivityRegularization(l1=0.01, l2=0.01),
        layers.Lambda(lambda x: x * 2.0),
        layers.Identity(),
        layers.Flatten(),
        layers.Reshape((2, 4)),
        layers.RepeatVector(2),
    )


@case(vectors)
def activations():
    return branches(
        (8,),
        layers.ELU(),
        layers.LeakyReLU(),
        layers.PReLU(),
        layers.ReLU(max_value=2.0),
        layers.Softmax(),
    )


@case(vectors)
def normalizations():
    return branches(
        (8,),
        layers.LayerNormalization(),
        layers.RMSNormalization(),
        layers.GroupNormalization(2),
        layers.UnitNormalization(),
        layers.Normalization(mean=0.5, variance=2.0),
        layers.Rescaling(0.5, offset=0.1),
    )


@case(vectors, copies=True, why="each worker has statistics of its own batch")
def batch_normalization():
    inputs = keras.Input((8,))
    return classifier(inputs, layers.BatchNormalization(momentum=0.8)(layers.Dense(4)(inputs)))


@case(vectors, refused={"async": "assigns-trainable-variable"} | ONE_UPDATE, why="assigns its kernel in each step")
def spectral_normalization():
    inputs = keras.Input((8,))
    return classifier(inputs, layers.SpectralNormalization(layers.Dense(4))(inputs))


@case(sequences)
def merging():
    inputs = keras.Input((6, 4))
    some, others = layers.Dense(4)(inputs), layers.Dense(4, "tanh")(inputs)
    kinds = (layers.Add, layers.Average, layers.Maximum, layers.Minimum, layers.Multiply, layers.Subtract)
    merged = [kind()([some, others]) for kind in kinds]
    joined = layers.Concatenate()([*merged, layers.Permute((2, 1))(layers.Dot(axes=2)([some, others]))])
    return classifier(inputs, layers.GlobalAveragePooling1D()(joined))


@case(sequences)
def dropouts():
    inputs = keras.Input((6, 4))
    x = layers.Dense(8)(inputs)
    x = layers.SpatialDropout1D(0.2)(x)
    x = layers.GaussianNoise(0.1)(layers.GaussianDropout(0.2)(layers.AlphaDropout(0.2)(layers.Dropout(0.2)(x))))
    plane = layers.SpatialDropout2D(0.2)(layers.Reshape((3, 2, 8))(x))
    space = layers.SpatialDropout3D(0.2)(layers.Reshape((3, 2, 2, 4))(x))
    return classifier(inputs, layers.concatenate([layers.Flatten()(plane), layers.Flatten()(space)]))


@case(sequences)
def layers_1d():
    return branches(
        (6, 4),
        layers.Conv1D(3, 2),
        layers.Conv1DTranspose(3, 2, strides=2),
        layers.DepthwiseConv1D(2),
        layers.SeparableConv1D(3, 2),
        layers.AveragePooling1D(2),
        layers.MaxPooling1D(2),
        layers.GlobalAveragePooling1D(),
        layers.GlobalMaxPooling1D(),
        layers.AdaptiveAveragePooling1D(3),
        layers.AdaptiveMaxPooling1D(3),
        layers.Cropping1D(1),
        layers.UpSampling1D(2),
        layers.ZeroPadding1D(1),
    )


@case(images)
def convolutions_2d():
    inputs = keras.Input((8, 8, 3))
    scaled = layers.Rescaling(1 / 255)(inputs)
    kinds = (
        layers.Conv2D(3, 3, padding="same", activation="relu"),
        layers.Conv2DTranspose(2, 3, strides=2),
        layers.DepthwiseConv2D(3),
        layers.SeparableConv2D(3, 3),
    )
    return classifier(inputs, layers.concatenate([layers.GlobalMaxPooling2D()(kind(scaled)) for kind in kinds]))


@case(images)
def layers_2d():
    return branches(
        (8, 8, 3),
        layers.AveragePooling2D(2),
        layers.MaxPooling2D(2),
        layers.GlobalAveragePooling2D(),
        layers.GlobalMaxPooling2D(),
        layers.AdaptiveAveragePooling2D(3),
        layers.AdaptiveMaxPooling2D(3),
        layers.Cropping2D(1),
        layers.UpSampling2D(2),
        layers.ZeroPadding2D(1),
        layers.Resizing(5, 5),
        layers.CenterCrop(4, 4),
    )


@case(volumes)
def layers_3d():
    return branches(
        (4, 4, 4, 2),
        layers.Conv3D(3, 2),
        layers.Conv3DTranspose(2, 2),
        layers.AveragePooling3D(2),
        layers.MaxPooling3D(2),
        layers.GlobalAveragePooling3D(),
        layers.GlobalMaxPooling3D(),
        layers.AdaptiveAveragePooling3D(2),
        layers.AdaptiveMaxPooling3D(2),
        layers.Cropping3D(1),
        layers.UpSampling3D(2),
        layers.ZeroPadding3D(1),
    )


@case(sequences)
def recurrent_layers():
    return branches(
        (6, 4),
        layers.SimpleRNN(3),
        layers.LSTM(3),
        layers.GRU(3, reset_after=False),
        layers.Bidirectional(layers.LSTM(2)),
        layers.TimeDistributed(layers.Dense(2)),
    )


@case(sequences)
def recurrent_cells():
    return branches(
        (6, 4),
        layers.RNN(layers.SimpleRNNCell(3)),
        layers.RNN(layers.StackedRNNCells([layers.LSTMCell(3), layers.GRUCell(2)])),
    )


@case(tokens)
def recurrent_layers_with_masks():
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 4, mask_zero=True)(inputs)
    pooled = layers.Bidirectional(layers.GRU(3, return_sequences=True))(x)
    return classifier(inputs, layers.concatenate([layers.LSTM(3)(pooled), layers.SimpleRNN(2)(x)]))


@case(sequences)
def recurrent_layers_with_dropout():
    inputs = keras.Input((6, 4))
    x = layers.LSTM(3, dropout=0.2, recurrent_dropout=0.2, return_sequences=True)(inputs)
    return classifier(inputs, layers.GRU(3, dropout=0.2)(x))


@case(sequences)
def masking():
    inputs = keras.Input((6, 4))
    return classifier(inputs, layers.GlobalAveragePooling1D()(layers.Dense(3)(layers.Masking(0.0)(inputs))))


def frames_1d():
    return floats(3, 6, 2), labels()


def frames_2d():
    return floats(3, 5, 5, 2), labels()


def frames_3d():
    return floats(2, 3, 3, 3, 1), labels()


@case(frames_1d)
def convolutional_lstm_1d():
    return branches((3, 6, 2), layers.ConvLSTM1D(2, 3))


@case(frames_2d)
def convolutional_lstm_2d():
    return branches((3, 5, 5, 2), layers.ConvLSTM2D(2, 3))


@case(frames_3d)
def convolutional_lstm_3d():
    return branches((2, 3, 3, 3, 1), layers.ConvLSTM3D(1, 2))


@case(sequences)
def attention():
    inputs = keras.Input((6, 4))
    query, value = layers.Dense(4)(inputs), layers.Dense(4)(inputs)
    seen = [
        layers.Attention(use_scale=True)([query, value]),
        layers.AdditiveAttention()([query, value]),
        layers.MultiHeadAttention(2, 3)(query, value),
        layers.GroupQueryAttention(3, 4, 2)(query, value),
    ]
    return classifier(inputs, layers.GlobalAveragePooling1D()(layers.concatenate(seen)))


@case(tokens)
def embeddings():
    inputs = keras.Input((6,), dtype="int32")
    some = layers.Embedding(20, 4)(inputs)
    reversible = layers.ReversibleEmbedding(20, 4)
    back = reversible(layers.Dense(4, "tanh")(reversible(inputs)), reverse=True)
    return classifier(inputs, layers.GlobalAveragePooling1D()(layers.concatenate([some, back])))


class Scale(layers.Layer):
    """A user-defined layer with a weight, a loss and an input specification."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.input_spec = layers.InputSpec(ndim=2)

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * ops.mean(ops.square(x * self.scale)))
        return x * self.scale


class Doubled(layers.Wrapper):
    """A user-defined wrapper."""

    def call(self, x: Any) -> Any:
        return 2.0 * self.layer(x)


@case(vectors)
def layers_of_the_users_own():
    inputs = keras.Input((8,))
    return classifier(inputs, Scale()(Doubled(layers.Dense(4))(inputs)))


def integers_and_words() -> Any:
    return {"number": integers(10, 1), "other": integers(7, 1), "word": words()[0], "size": floats(1)}, labels()


def _categories(lookups: Any) -> keras.Model:
    inputs = {
        "number": keras.Input((1,), dtype="int32", name="number"),
        "other": keras.Input((1,), dtype="int32", name="other"),
        "word": keras.Input((1,), dtype="string", name="word"),
        "size": keras.Input((1,), name="size"),
    }
    return classifier(inputs, layers.concatenate([layers.Dense(2, "tanh")(found) for found in lookups(inputs)]))


@case(integers_and_words)
def categories():
    return _categories(
        lambda given: [
            layers.CategoryEncoding(10, output_mode="one_hot")(given["number"]),
            layers.CategoryEncoding(9, output_mode="one_hot")(
                layers.IntegerLookup(vocabulary=[1, 2, 3, 5, 7, 8, 9, 4])(given["number"])
            ),
            layers.Hashing(4, output_mode="one_hot")(given["other"]),
            layers.HashedCrossing(5, output_mode="one_hot")((given["number"], given["other"])),
            layers.Discretization([-0.5, 0.0, 0.5], output_mode="one_hot")(given["size"]),
            layers.StringLookup(vocabulary=["the cat sat", "a mat on"], output_mode="one_hot")(given["word"]),
        ]
    )


@case(words)
def text_vectorization():
    inputs = keras.Input((1,), dtype="string")
    tokenize = layers.TextVectorization(
        vocabulary=["the", "cat", "sat", "on", "a"], output_sequence_length=4, max_tokens=10
    )
    return classifier(inputs, layers.GlobalAveragePooling1D()(layers.Embedding(10, 4)(tokenize(inputs))))


@case(words)
def string_lookup_without_unknown_words_and_dropout():
    inputs = keras.Input((1,), dtype="string")
    known = sorted({text for (text,) in words()[0]})
    ids = layers.StringLookup(vocabulary=known, num_oov_indices=0)(inputs)
    return classifier(inputs, layers.Dropout(0.2)(layers.Flatten()(layers.Embedding(len(known), 4)(ids))))


@case(images)
def adapted_normalization():
    inputs = keras.Input((8, 8, 3))
    normalize = layers.Normalization()
    normalize.adapt(images()[0])
    return classifier(inputs, layers.GlobalMaxPooling2D()(layers.Conv2D(3, 3)(normalize(inputs))))


def sounds() -> Any:
    return floats(256), labels()


@case(sounds)
def spectrograms():
    inputs = keras.Input((256,))
    mel = layers.MelSpectrogram(fft_length=64, sequence_stride=32, num_mel_bins=8, sampling_rate=256, max_freq=100)
    stft = layers.STFTSpectrogram(mode="log", frame_length=32, frame_step=32, fft_length=32, window=None)
    found = [layers.Flatten()(mel(inputs)), layers.Flatten()(stft(layers.Reshape((256, 1))(inputs)))]
    return classifier(inputs, layers.Dense(4, "tanh")(layers.LayerNormalization()(layers.concatenate(found))))


def _augmented(*kinds: Any) -> keras.Model:
    inputs = keras.Input((8, 8, 3))
    features = [layers.Flatten()(layers.Rescaling(1 / 255)(kind(inputs))) for kind in kinds]
    joined = layers.concatenate(features) if len(features) > 1 else features[0]
    return classifier(inputs, layers.Dense(4, "tanh")(joined))


AUGMENTATIONS: dict[str, Any] = {
    "augmentation_of_colours": lambda: (
        layers.RandomBrightness(0.2, seed=1),
        layers.RandomColorDegeneration(0.5, seed=2),
        layers.RandomColorJitter(brightness_factor=0.1, contrast_factor=0.1, seed=3),
        layers.RandomContrast(0.2, seed=4),
        layers.RandomGrayscale(0.5, seed=5),
        layers.RandomHue(0.2, seed=6),
        layers.RandomInvert(0.5, seed=7),
        layers.RandomPosterization(4, seed=8),
        layers.RandomSaturation(0.4, seed=9),
        layers.RandomSharpness(0.4, seed=10),
        layers.Solarization(0.1, 0.5, seed=11),
    ),
    "augmentation_of_positions": lambda: (
        layers.RandomFlip(seed=1),
        layers.RandomRotation(0.1, seed=2),
        layers.RandomShear(0.1, 0.1, seed=3),
        layers.RandomTranslation(0.1, 0.1, seed=4),
        layers.RandomZoom(0.1, seed=5),
        layers.RandomPerspective(seed=6),
        lambda x: layers.Resizing(8, 8)(layers.RandomCrop(6, 6, seed=7)(x)),
    ),
    "augmentation_by_areas": lambda: (
        layers.RandomElasticTransform(seed=1),
        layers.RandomErasing(seed=2),
        layers.RandomGaussianBlur(seed=3),
    ),
    "random_policies": lambda: (layers.RandAugment(seed=1),),
    "equalizations": lambda: (
        layers.AutoContrast(),
        layers.Equalization(),
        layers.ContrastLimitedAdaptiveHistogramEqualization(tile_grid_size=(2, 2)),
        layers.Pipeline([layers.RandomFlip(seed=1), layers.Rescaling(0.5)]),
    ),
}
for _name, _kinds in AUGMENTATIONS.items():
    add_case(_name, Case(lambda kinds=_kinds: _augmented(*kinds()), images))  # type: ignore[misc]
add_case("mixed_augmentations", Case(lambda: _augmented(layers.AugMix(seed=2)), images, traced_at_random=True))


class ForClasses(layers.Layer):
    """Applies a Keras layer that augments images together with their labels."""

    def __init__(self, augment: Any) -> None:
        super().__init__()
        self.augment = augment

    def call(self, x: Any, y: Any) -> Any:
        changed = self.augment({"images": x, "labels": ops.one_hot(y, CLASSES)})
        return changed["images"], changed["labels"]


def _of_soft_labels() -> keras.Model:
    inputs = keras.Input((8, 8, 3))
    model = classifier(inputs, layers.GlobalAveragePooling2D()(layers.Conv2D(2, 3)(layers.Rescaling(1 / 255)(inputs))))
    model.compile(keras.optimizers.SGD(0.05), keras.losses.CategoricalCrossentropy(from_logits=True))
    return model


add_case("mix_up_in_the_data", Case(_of_soft_labels, images, pipeline=lambda: ForClasses(layers.MixUp(seed=1))))
add_case("cut_mix_in_the_data", Case(_of_soft_labels, images, pipeline=lambda: ForClasses(layers.CutMix(seed=1))))


class Boxes(layers.Layer):
    """Pads the bounding boxes of all images to the same number."""

    def __init__(self) -> None:
        super().__init__()
        self.pad = layers.MaxNumBoundingBoxes(3, bounding_box_format="xyxy")

    def call(self, x: Any, y: Any) -> Any:
        boxes = tf.tile(tf.constant([[[0.0, 0.0, 4.0, 4.0]]]), [tf.shape(x)[0], 2, 1])
        given = {"boxes": boxes, "labels": tf.tile(y[:, None], [1, 2])}
        changed = self.pad({"images": x, "bounding_boxes": given})
        return changed["images"] + tf.reduce_sum(changed["bounding_boxes"]["boxes"]), y


@case(images, pipeline=Boxes)
def bounding_boxes_in_the_data():
    inputs = keras.Input((8, 8, 3))
    return classifier(inputs, layers.GlobalAveragePooling2D()(layers.Conv2D(2, 3)(layers.Rescaling(1 / 255)(inputs))))


class Exported(tf.Module):
    """A function of a SavedModel."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = tf.Variable(np.ones(8, np.float32) * 0.5)

    @tf.function(input_signature=[tf.TensorSpec([None, 8])])
    def serve(self, x: Any) -> Any:
        return tf.nn.tanh(x * self.factor)


@case(vectors, refused={"": "gradient-lost"}, why="the SavedModel reads its own tf.Variable")
def saved_model_layer():
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(Exported(), folder)
        loaded = layers.TFSMLayer(folder, call_endpoint="serve")
    inputs = keras.Input((8,))
    return classifier(inputs, loaded(inputs), keras.optimizers.SGD(0.1))
