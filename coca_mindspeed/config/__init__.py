"""One YAML for two engines: composition and validation."""
