"""Image files, and their pixels (reading, writing). Importing this room loads no OpenCV."""

from brim.segmentation.images.files import (
    MAX_PIXELS,
    ImageFile,
    ImageInput,
    StoredImage,
    find_images,
    header_size,
    image_bytes,
    image_size,
    is_image_name,
)

__all__ = [
    "MAX_PIXELS",
    "ImageFile",
    "ImageInput",
    "StoredImage",
    "find_images",
    "header_size",
    "image_bytes",
    "image_size",
    "is_image_name",
]
