"""Trainings of SmolLM2 that wait for a GPU, in slices of a few minutes, and a profile of one update."""
