"""Batches on a device: augmentation, the DataLoader for unpacked folders, and corpora held in a memory tier."""

from brim.sequences.batches.augmentation import augment, two_views
from brim.sequences.batches.batches import SequenceBatches, make_variants
from brim.sequences.batches.dataloader import BatchPlan, SequenceLoader

__all__ = [
    "BatchPlan",
    "SequenceBatches",
    "SequenceLoader",
    "augment",
    "make_variants",
    "two_views",
]
