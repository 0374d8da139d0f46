"""The paper's figures, and comparisons with them."""
