"""`python -m brim` is the same as `brim`."""

import os
import sys

from brim.cli import main

code = main()
if code and os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):
    # One of several ranks that failed: an orderly end would wait for messages of ranks that will not come.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
sys.exit(code)
