"""Verbs that set a node up, or take ckptd away."""
