"""Does a confidence that learns on questions of its own hold on new questions?  Arms, controls and their table."""
