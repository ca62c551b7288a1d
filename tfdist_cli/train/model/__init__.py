"""The train and test step of a Keras model as pure functions: losses, metrics, evaluation, random seeds, embeddings."""
