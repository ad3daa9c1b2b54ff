"""Resume and restore."""
