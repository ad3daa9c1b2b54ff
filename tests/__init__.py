"""Tests of ckptd."""
