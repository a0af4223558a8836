"""What any training waits for: a script is watched unmodified, and what would help it is measured."""
