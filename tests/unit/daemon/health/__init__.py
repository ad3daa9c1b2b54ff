"""Tests of daemon/health."""
