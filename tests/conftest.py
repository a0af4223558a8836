"""Before anything imports torch: threads that wait soon sleep, as on the command line; on a busy machine tests crawl."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
