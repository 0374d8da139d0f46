"""Preparing data sets: filtering, decontamination, deduplication, label check, atomic output."""
