"""Measuring a recipe on clusters of several sizes: what is run, what is read of it, and what it comes to."""
