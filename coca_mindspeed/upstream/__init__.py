"""What an engine needs that stands on somebody else's program: which sources it knows, and changes on import."""
