"""uploads."""
