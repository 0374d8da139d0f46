"""Conversion of published data files into records."""
