"""One YAML for two engines: composition, validation, and the plan of a run."""
