"""Tests of daemon/resources."""
