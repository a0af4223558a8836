"""Polygons from masks, and masks from polygons."""
