"""The paper's figures, and runs compared with them."""
