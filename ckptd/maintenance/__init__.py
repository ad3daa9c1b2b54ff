"""Maintain what ckptd keeps: verify, repair, gc, list, check, uninstall."""
