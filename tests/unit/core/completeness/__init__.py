"""Tests of core/completeness."""
