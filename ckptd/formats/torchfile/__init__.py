"""Torch archives and pickles, read without torch."""
