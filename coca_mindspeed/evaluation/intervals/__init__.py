"""Intervals of the metrics, shown by simulation to hold."""
