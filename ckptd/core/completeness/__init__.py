"""Judge whether a folder is a whole save."""
