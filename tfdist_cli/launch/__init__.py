"""Starts the tasks of a plan somewhere, watches them, and ends them together."""
