"""The paper's comparison as one command: every method, several seeds, its tables with our numbers in them."""
