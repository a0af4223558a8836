"""How images become polygons: what a caller may choose, checked once."""

from dataclasses import dataclass

from brim.errors import ConfigError
from brim.segmentation.prediction.tiles import DEFAULT_TILE, MIN_SIDE, check_tile


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictConfig:
    """How images become polygons."""

    batch_size: int = 1  # patches the network sees at once
    threshold: float = 0.5  # probability above which a pixel is foreground
    detect_holes: bool = True
    strict: bool = False  # every patch alone: the same bits whatever else is predicted
    tile: int = DEFAULT_TILE  # pixels; larger images are cut into windows of this side and blended
    overlap: int | None = None  # pixels that windows share; None is an eighth of the tile
    resize: int | None = None  # pixels; instead of tiling, every image is seen at this side and its mask enlarged back

    def __post_init__(self) -> None:
        """Check every value."""
        check_batch_size(self.batch_size)
        check_threshold(self.threshold)
        check_tile(self.tile, self.overlap)
        if self.resize is not None and (type(self.resize) is not int or self.resize < MIN_SIDE):
            raise ConfigError(f"resize={self.resize} must be a whole number of at least {MIN_SIDE} pixels, or omitted")


def check_batch_size(batch_size: object) -> None:
    """Refuse what is not a count."""
    if type(batch_size) is not int or batch_size < 1:  # type: True is an int as well
        raise ConfigError(f"batch_size={batch_size!r} must be a whole number of at least 1; omit it for the tuned one")


def check_threshold(threshold: object) -> None:
    """Refuse what is no probability, or one that makes everything or nothing foreground."""
    is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if not (is_number and 0 < float(str(threshold)) < 1):
        raise ConfigError(f"threshold={threshold!r} must be a number above 0 and below 1; 0.5 is the default")
