"""The training loop: step, checkpoint, ranks, report."""
