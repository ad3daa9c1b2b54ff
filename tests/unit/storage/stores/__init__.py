"""Tests of storage/stores."""
