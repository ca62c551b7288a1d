"""Predictions of a trained model for files of any size, written in parts that a later call continues."""
