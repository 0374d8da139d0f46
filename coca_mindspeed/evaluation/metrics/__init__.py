"""Calibration metrics and their specs."""
