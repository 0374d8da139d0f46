"""The manifest of hooks, verified by fingerprints and applied whole or not at all."""
