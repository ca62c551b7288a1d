"""Decides when a job goes on, restarts and ends: pure values, no processes."""
