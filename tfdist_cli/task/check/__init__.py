"""The process of `tfdist check`: builds the recipe's model, draws batches, and takes one step, without a cluster."""
