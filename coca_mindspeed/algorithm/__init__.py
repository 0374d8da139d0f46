"""The paper as pure functions on tensors and strings, which all three engines call."""
