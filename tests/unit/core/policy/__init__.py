"""Tests of core/policy."""
