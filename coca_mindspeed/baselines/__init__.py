"""What the paper compares CoCA with: other ways to say how likely a model is to answer correctly."""
