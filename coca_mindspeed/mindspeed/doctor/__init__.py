"""What a machine lacks for a run, and how to mend it."""
