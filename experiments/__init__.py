"""Experiments with coca_mindspeed, run from a checkout; not part of the installed package."""

from coca_mindspeed.utils.packages import name_missing_packages

name_missing_packages()  # for every module here that python -m runs
