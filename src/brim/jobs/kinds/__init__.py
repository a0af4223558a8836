"""The kinds of job: what each reads, its config, and how it runs."""
