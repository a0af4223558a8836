"""Before anything imports torch: threads that wait soon sleep, as on the command line."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
