"""Questions in: every data set becomes the one record type of :mod:`coca_mindspeed.data.records`."""
