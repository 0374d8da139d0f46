"""May this run, and what does it mean: asked before anything is started."""
