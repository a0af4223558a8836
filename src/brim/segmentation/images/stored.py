"""Images in an object store, which are read when their turn comes."""

from dataclasses import dataclass

from brim.engine.storage import Place
from brim.errors import ImageError

FIRST_BYTES = 2**23  # asked for at once: few images have more


@dataclass(frozen=True, slots=True)
class StoredImage:
    """One object that holds an image."""

    place: Place
    key: str  # below the place

    def __str__(self) -> str:
        """Its URL."""
        return self.place.at(self.key)

    def read(self, limit_bytes: int) -> bytes:
        """Its bytes: one request for most images; a large one is measured before the rest is read."""
        try:
            data = self.place.read_bytes(self.key, 0, FIRST_BYTES)
            if len(data) < FIRST_BYTES:
                return data
            size = self.place.size(self.key)
            if size > limit_bytes:
                raise ImageError(f"{size} bytes are more than an image of its pixels needs")
            return data + self.place.read_bytes(self.key, FIRST_BYTES, size)
        except FileNotFoundError as failure:
            raise ImageError("cannot be read: no such object") from failure
