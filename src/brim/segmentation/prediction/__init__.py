"""Images through a network: one, many, whole folders, a cluster, requests."""
