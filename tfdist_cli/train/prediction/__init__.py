"""Predictions on the cluster: each example once, in the order of the data."""
