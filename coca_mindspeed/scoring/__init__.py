"""Scoring, shared by all engines: from sampled responses to rewards, advantages, metrics and sample rows."""
