"""What users write: the cluster and the recipe, how their files are read, checked and written."""
