"""What `tf.data`'s service publishes no interface for: how a data worker stops to take examples, and leaves."""
