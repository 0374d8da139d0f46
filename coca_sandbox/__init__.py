"""Run programs written by a model against their tests, in a bubblewrap sandbox. Standard library only."""
