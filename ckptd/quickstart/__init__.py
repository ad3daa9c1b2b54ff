"""The whole job for real on one machine, judged by something that is not ckptd."""
