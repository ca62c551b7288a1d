"""Rows of dynamic tables that are pushed to a folder after checkpoints."""
