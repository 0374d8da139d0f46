"""The hooks of a verified manifest, applied whole or not at all."""
