"""Images with the outlines of their objects, as figures of a page."""

import base64
from collections.abc import Sequence
from html import escape

import cv2
import numpy as np
from numpy.typing import NDArray

from brim.segmentation.objects.scores import ObjectLabels

YELLOW, CYAN = (255, 196, 0), (0, 220, 255)
_QUALITY = 85  # of a JPEG
_GRID = "display:grid;grid-template-columns:repeat(auto-fill,minmax(20rem,1fr));gap:1rem"


def outlined(picture: NDArray[np.uint8], labels: ObjectLabels, colour: tuple[int, int, int]) -> NDArray[np.uint8]:
    """A copy of an image (H, W, 3) with the borders between labels (H, W) in a colour."""
    edge = np.zeros(labels.shape, bool)
    edge[1:] |= labels[1:] != labels[:-1]
    edge[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    copy = picture.copy()
    copy[edge] = colour
    return copy


def jpeg(pictures: Sequence[NDArray[np.uint8]]) -> str:
    """Images of one height, RGB, beside each other, as base64."""
    row = np.hstack(pictures)[:, :, ::-1]
    return base64.b64encode(cv2.imencode(".jpg", row, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])[1].tobytes()).decode()


def figure(caption: str, picture: str) -> str:
    """A jpeg over its caption, as HTML."""
    text = escape(caption)
    return (
        f'<figure style="margin:0"><img style="width:100%" alt="{text}" src="data:image/jpeg;base64,{picture}">'
        f'<figcaption class="small">{text}</figcaption></figure>'
    )


def figures(entries: Sequence[str]) -> str:
    """Figures in a grid."""
    return f'<div style="{_GRID}">{"".join(entries)}</div>'
