"""brim fills a GPU to the brim: synthetic data, training and served predictions that never leave the device waiting."""

__version__ = "0.1.0"
