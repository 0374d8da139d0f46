"""The paper, in four pages: pure functions on tensors and strings, which both engines call."""
