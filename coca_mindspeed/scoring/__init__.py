"""What every engine does with sampled responses: judge them, describe the batch, show some of it."""
