"""Checkpoints and exported models: written whole, verified when read."""
