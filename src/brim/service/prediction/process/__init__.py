"""Prediction over HTTP: a process apart from the API runs the models; bytes cross by shared memory."""
