"""Facts: by their aliases, or by a language model that is asked."""
