"""Where the time goes: stages, waiting, share of the ceiling."""
