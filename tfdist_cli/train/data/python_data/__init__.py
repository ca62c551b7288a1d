"""Data that Python code of this process yields: generators, `PyDataset` and DataLoaders.

Only the process with the object can read it. With parameter servers this is the chief, whose next batch goes to the
worker that asks first. Mirrored workers all run the program: each reads its own share of the batches.
"""
