"""From a folder to a sealed save."""
