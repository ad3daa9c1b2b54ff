"""Tests of formats/zero."""
