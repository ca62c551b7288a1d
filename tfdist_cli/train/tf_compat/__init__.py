"""Workarounds for TensorFlow and Keras: private names, and behaviour that differs between versions."""
