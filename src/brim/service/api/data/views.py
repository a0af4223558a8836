"""What the routes of charts, maps and downloads share in one API process."""

from dataclasses import dataclass, field

from brim.service.api.data.export import Exports
from brim.service.api.data.statistics import KeptStatistics, OneAtATime


@dataclass(frozen=True, slots=True)
class Views:
    """Work that must not take the API with it, however often it is asked for."""

    slow: OneAtATime = field(default_factory=OneAtATime)
    exports: Exports = field(default_factory=Exports)
    statistics: KeptStatistics = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "statistics", KeptStatistics(self.slow))
