"""The metrics of calibration, and the one catalogue of their names."""
