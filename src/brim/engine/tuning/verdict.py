"""What a search over batch sizes says in words: what batching is worth, and what limits the step."""

from brim.engine.tuning.trial_book import Trial, TrialBook

STALLED = 0.8  # a device busy for less of the time is not what limits the step


def verdict(book: TrialBook, chosen: int) -> str:
    """What batching is worth here and what limits the step, in a sentence or two."""
    trial, best = book.merged(chosen), book.merged(book.best() or chosen)
    if trial.status != "ok":
        return f"no batch keeps the limits: even batch {chosen} is {trial.status}, {trial.detail}"
    host = _not_the_device(trial)
    if book.sizes() == [1]:
        return f"only batch 1 was measured: {trial.throughput:.4g}/s" + f"; {host}" * bool(host)
    single = book.rate(1)
    share = single / best.throughput
    if chosen == 1:
        why = host or "one item keeps the device as busy as many"
        return f"batching does not matter: batch 1 reaches {min(1.0, share):.0%} of the best; {why}"
    gain = f"batch {chosen} gives {trial.throughput:.4g}/s, {trial.throughput / single:.3g} times batch 1"
    return f"{gain}; {host}" if host else gain


def _not_the_device(trial: Trial) -> str:
    """Says so when the step waits for something else than the device."""
    stages = trial.stages or {}
    total_s = sum(stages.values())
    name = max(stages, key=lambda stage: stages[stage], default="device")
    if name != "device" and stages[name] > 0.5 * total_s:
        return f"not limited by the device: {stages[name] / total_s:.0%} of the time in {name}"
    if trial.device_share is not None and trial.device_share < STALLED:
        return f"not limited by the device: it is busy for {trial.device_share:.0%} of the time and waits for the host"
    return ""
