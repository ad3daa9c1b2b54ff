"""Checkpoints of a GPU: trained, protected, converted and resumed from on a machine that has one."""
