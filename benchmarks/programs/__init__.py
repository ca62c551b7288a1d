"""One program per peer: the same model on the same data, trained with the peer's public `fit`."""
