"""Data for recipes: digits that come with tfdist, MNIST and clicks from a user's own files, clicks that are made up."""
