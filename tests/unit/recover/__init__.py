"""Tests of recover."""
