"""Conversions from a remote, into a remote."""
