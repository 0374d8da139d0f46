"""Answers of mathematics: by notation, by value, and at last by symbols."""
