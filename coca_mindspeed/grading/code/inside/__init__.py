"""What runs inside of the sandbox.  Standard library only, and nothing of the rest of the package: it is not there."""
