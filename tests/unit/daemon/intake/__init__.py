"""Tests of daemon/intake."""
