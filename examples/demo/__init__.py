"""The demonstration: a real training, crashes and a judge that knows nothing of ckptd."""
