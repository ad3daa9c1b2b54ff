"""Tests of daemon/actions."""
