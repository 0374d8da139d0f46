"""Serving by the stated confidence: a routing proxy, a server of one model, and replay from stored predictions."""
