"""Confidence intervals of the metrics; their coverage is tested by simulation."""
