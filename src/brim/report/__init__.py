"""Charts and HTML pages, used by all workloads."""
