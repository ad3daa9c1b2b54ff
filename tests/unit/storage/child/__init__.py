"""Tests of storage/child."""
