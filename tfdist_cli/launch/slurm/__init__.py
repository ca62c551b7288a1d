"""Runs the tasks of a plan as one Slurm job."""
