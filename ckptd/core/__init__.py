"""Decide without side effects: values, completeness, policy."""
