"""The training library: `scope`, `fit` and what they are made of. It imports TensorFlow; nothing above it does."""
