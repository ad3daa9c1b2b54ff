"""Turn folders into sealed saves."""
