"""The engine of one process, `MirroredStrategy` and `MultiWorkerMirroredStrategy`."""
