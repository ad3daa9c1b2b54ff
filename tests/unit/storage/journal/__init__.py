"""Tests of storage/journal."""
