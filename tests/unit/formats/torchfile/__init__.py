"""Tests of formats/torchfile."""
