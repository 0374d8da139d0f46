"""Recalibration maps and certified error bounds, from labelled predictions."""
