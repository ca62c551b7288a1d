"""Output on the terminal: tables, progress, the summary of a run."""
