"""Benchmarks: ``make bench``; each compares two ways of doing the same work in one run, because ratios travel."""

from coca_mindspeed.utils.packages import name_missing_packages

name_missing_packages()  # for every module here that python -m runs
