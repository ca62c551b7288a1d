"""Engines run training steps; the training loop does not know which one."""
