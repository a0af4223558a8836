"""Datasets, runs and models that people bring or that jobs made."""
