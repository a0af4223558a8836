"""Sequences: pack variable-length features once, train on them at the ceiling, learn with or without labels."""
