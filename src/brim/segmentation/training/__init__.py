"""Training a segmentation network on images and masks."""
