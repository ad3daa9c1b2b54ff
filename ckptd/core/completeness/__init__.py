"""Whether a folder is a whole save."""
