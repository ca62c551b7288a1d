"""Data for recipes: digits that come with tfdist and lines of them; MNIST and clicks from your files, or made up."""
