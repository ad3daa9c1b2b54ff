"""Which copy of which save."""
