"""The registry of what a job can be. Importing it loads no torch: a kind's workload is imported when it runs."""

from typing import Final

from brim.jobs.kinds import rf, segment, sequence
from brim.jobs.kinds.kind import Kind

KINDS: Final[dict[str, Kind]] = {kind.name: kind for kind in (*rf.KINDS, *segment.KINDS, *sequence.KINDS)}
