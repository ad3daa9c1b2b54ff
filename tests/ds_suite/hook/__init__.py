"""This folder goes on PYTHONPATH of the suite's processes (see ../run.py)."""
