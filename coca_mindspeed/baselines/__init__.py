"""The paper's baselines: other estimates of a model's probability to answer correctly."""
