"""Drawn images with their truth."""
