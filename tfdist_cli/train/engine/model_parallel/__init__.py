"""The engine of a model whose layers are on several workers."""
