"""Benchmarks: ``make bench``; each compares two ways of doing the same work in one run, because ratios travel."""
