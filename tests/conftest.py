"""Before anything imports torch: threads that wait sleep, as on the command line, or tests crawl on a shared machine."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
