"""`python -m brim` is the same as `brim`."""

import sys

from brim.cli import main

sys.exit(main())
