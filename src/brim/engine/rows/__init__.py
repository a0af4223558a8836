"""From a source of rows to batches on the device: sources, order, tiers, ragged rows."""
