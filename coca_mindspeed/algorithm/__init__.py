"""The paper: pure functions on tensors and strings, a page for each of its ideas, which all three engines call."""
