"""Writes the files of a new project: from templates, from a Keras script, or tfdist's own demo."""
