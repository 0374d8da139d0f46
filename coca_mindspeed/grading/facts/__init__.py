"""Facts: compared with aliases, or judged by a language model."""
