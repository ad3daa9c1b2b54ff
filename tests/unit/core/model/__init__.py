"""Tests of core/model."""
