"""Trainings from programs of Spark and Ray: their tables as data, and their executors or nodes as hosts of tasks."""
