"""Experiments with coca_mindspeed, run from a checkout; not part of the installed package."""
