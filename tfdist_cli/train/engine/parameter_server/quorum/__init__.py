"""Updates with a quorum: the chief decides which gradients make an update, for backup workers and staleness."""
