"""Tests of storage/local."""
