"""The fastest batch size that fits."""
