"""Images in an object store, which are read when their turn comes."""

from dataclasses import dataclass

from brim.engine.storage import Place
from brim.errors import ImageError


@dataclass(frozen=True, slots=True)
class StoredImage:
    """One object that holds an image."""

    place: Place
    key: str  # below the place

    def __str__(self) -> str:
        """Its URL."""
        return self.place.at(self.key)

    def read(self, limit_bytes: int) -> bytes:
        """Its bytes in one request, of which a larger object than the limit costs no more than the limit."""
        try:
            data = self.place.read_bytes(self.key, 0, limit_bytes + 1)
        except FileNotFoundError as failure:
            raise ImageError("cannot be read: no such object") from failure
        if len(data) > limit_bytes:
            raise ImageError(f"more than {limit_bytes} bytes, which is more than an image of its pixels needs")
        return data
