"""Verify, repair, gc, list, check, uninstall."""
