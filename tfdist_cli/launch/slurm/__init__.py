"""Runs the tasks of a plan as one job of Slurm's."""
