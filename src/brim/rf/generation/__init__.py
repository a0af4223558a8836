"""Datasets of accepted samples, on a CPU or a GPU."""
