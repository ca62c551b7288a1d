"""Decides when a job continues, restarts and ends: a pure state machine without processes."""
