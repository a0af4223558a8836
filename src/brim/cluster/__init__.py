"""The same work on many devices: worker processes of this machine, or Ray's of many."""
