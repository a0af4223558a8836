"""`brim serve`: an API process and worker processes, kept alive by a supervisor."""
