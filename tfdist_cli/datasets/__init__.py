"""Small data sets as NumPy arrays: handwritten digits that come with tfdist, and MNIST from a user's own files."""
