"""Copies the metrics of a run to TensorBoard, MLflow, Weights & Biases and CSV files, in a process for each."""
