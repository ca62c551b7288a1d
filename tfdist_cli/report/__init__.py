"""The HTML report of runs: one file that needs neither a network nor other files."""
