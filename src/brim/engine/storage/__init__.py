"""Where files live (a directory or an object store), and datasets of shards with a manifest."""
