"""What the terminal shows: tables, progress, the summary of a run."""
