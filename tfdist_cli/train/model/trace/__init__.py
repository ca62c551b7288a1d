"""The graph of a step, and what follows from it: which values only add up, which depend on others."""
