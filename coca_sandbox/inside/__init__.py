"""The code inside of the sandbox. Standard library only; the rest of the package is not available there."""
