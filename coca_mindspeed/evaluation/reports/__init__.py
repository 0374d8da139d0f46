"""Tables, plots, reports and the live view of a running training."""
