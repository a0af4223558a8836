"""Before anything imports torch: threads that wait sleep, as on the command line; on a busy machine tests crawl."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
