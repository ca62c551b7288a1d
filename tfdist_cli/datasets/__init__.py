"""Data sets for recipes: digits and lines of digits (included), MNIST and Criteo (from files), generated clicks."""
