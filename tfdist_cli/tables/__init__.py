"""Rows of dynamic tables for servers: the files that a training pushes, and a reader of them that needs only NumPy."""

from tfdist_cli.tables.reader import PushedTable, TableReader

__all__ = ["PushedTable", "TableReader"]
