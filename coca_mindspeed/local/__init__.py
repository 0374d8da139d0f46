"""The engine that needs nothing but pip: one CPU or one CUDA device."""
