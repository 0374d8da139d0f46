"""Numbers and pictures out: metrics, predictions, plots and reports."""
