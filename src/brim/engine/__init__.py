"""Keeps a device busy; knows no radio, no images, no HTTP."""
