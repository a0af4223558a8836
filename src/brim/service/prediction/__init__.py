"""Predictions over HTTP: the API's side, and the process that runs the models."""
