"""The sections of cluster.yaml and recipe.yaml, one module each."""
