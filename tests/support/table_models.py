"""Model functions of trainings on tables, which their tasks import."""


def four_classes(units=32):
    """Learns which of the first four of eight numbers is the largest."""
    import keras  # noqa: PLC0415 it runs in the tasks

    network = keras.Sequential([keras.Input((8,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return network


def not_compiled():
    """Returns a model that cannot be trained."""
    import keras  # noqa: PLC0415 it runs in the tasks

    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_initializer="ones")])


class Models:
    """A place for a function with a longer name."""

    build = staticmethod(not_compiled)

    @staticmethod
    def four(units):
        """Returns a model of `four_classes`."""
        return four_classes(units)
