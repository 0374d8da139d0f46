"""Expectation of the stated confidence against its draws."""
