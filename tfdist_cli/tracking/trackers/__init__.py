"""The trackers: a module for each."""
