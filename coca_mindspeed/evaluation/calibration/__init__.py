"""What labels say about confidences: maps that recalibrate them, and errors that can be certified."""
