"""Conversions by Dask workers (the extra `cluster`)."""
