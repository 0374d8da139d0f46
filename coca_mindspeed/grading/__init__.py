"""Is this answer right?  Graders, and the processes that keep hostile answers from hurting anybody."""
