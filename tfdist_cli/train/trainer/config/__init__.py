"""The configuration of a training: its data, its length, its validation and its checkpoints."""
