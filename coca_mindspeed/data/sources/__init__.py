"""Publishers' files as they publish them, read row by row into records."""
