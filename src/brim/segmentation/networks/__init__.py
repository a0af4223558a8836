"""The networks, their layers and their weights."""
