"""Programs, run in a sandbox against their tests."""
