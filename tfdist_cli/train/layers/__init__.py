"""Keras layers for clusters: `tfdist.layers`."""

from tfdist_cli.train.layers.dynamic_embedding import DynamicEmbedding

__all__ = ["DynamicEmbedding"]
