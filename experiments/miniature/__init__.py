"""Questions that need no download: families of records, drawn from a seed."""
