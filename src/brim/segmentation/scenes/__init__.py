"""Generated images with their truth."""

from brim.segmentation.scenes.cells import make_cells, make_labels, write_cells

__all__ = ["make_cells", "make_labels", "write_cells"]
