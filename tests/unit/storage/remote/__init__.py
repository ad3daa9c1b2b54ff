"""Tests of storage/remote."""
