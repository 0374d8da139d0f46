"""The paper's figures as data, and ours beside them."""
