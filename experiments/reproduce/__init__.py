"""The paper's comparison: every method over several seeds, and tables beside the paper's figures."""
