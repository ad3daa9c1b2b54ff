"""Detect problems and tell people and programs of them."""
