"""Training with and without labels."""
