"""Mathematics: find the final answer of a response, give it one spelling, and compare it with the gold answer."""
