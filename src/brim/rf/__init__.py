"""Synthetic radio data by the batch: scene → link → waveform → channel → features → gates."""
