"""DeepSpeed's own universal checkpoint tests, run with ckptd in the place of `ds_to_universal`."""
