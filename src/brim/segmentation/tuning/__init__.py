"""The fastest safe batch size of a network on a device."""
