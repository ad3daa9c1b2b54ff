"""Select which copy of which save to take."""
