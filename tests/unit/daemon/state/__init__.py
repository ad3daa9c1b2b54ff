"""Tests of daemon/state."""
