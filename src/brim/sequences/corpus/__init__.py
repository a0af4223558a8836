"""From files of sequences to a packed corpus, and back to rows."""
