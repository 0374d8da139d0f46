"""Graders, and the processes that isolate untrusted answers."""
