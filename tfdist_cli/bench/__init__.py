"""Measures a recipe on clusters of several sizes: variants, measurements, results."""
