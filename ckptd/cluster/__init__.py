"""Conversion by the workers of a dask cluster: one plan, many machines (docs/convert-cluster.md)."""
