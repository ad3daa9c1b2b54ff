"""completeness."""
