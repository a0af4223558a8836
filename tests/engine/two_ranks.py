"""What two ranks do together, one scene after the other; each rank writes what it saw to OUT/RANK.json.

`torchrun --nproc-per-node 2 two_ranks.py OUT`, or without torchrun, for one process to compare with.
"""

import copy
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from brim.engine.config import TrainConfig
from brim.engine.rows.resident import Resident
from brim.engine.rows.source import TensorSource
from brim.engine.training.rank_share import Dropout, Share, computing, drawn, gathered, own_rows, share_norms
from brim.engine.training.ranks import Ranks, joined
from brim.engine.training.trainer import train
from brim.errors import ConfigError, RankLost

ITEMS, BATCH = 47, 6  # neither a multiple of two
CONFIG = TrainConfig(epochs=3, learning_rate=0.01, log_every=1, checkpoint_every_steps=4, tensorboard=False)


def rows(bad: int | None = None) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(ITEMS, 4, generator=rng)
    if bad is not None:
        x[bad, 1] = math.nan
    return {"x": x, "y": x.sum(1, keepdim=True)}


def network() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), Dropout(0.3), nn.Linear(16, 1))


def squared(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(module(batch["x"]), batch["y"])


def shaken(batch: dict[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
    noise = drawn(lambda whole: torch.randn(whole, generator=rng), tuple(batch["x"].shape))
    return batch | {"x": batch["x"] + 0.1 * noise}


def run(ranks: Ranks, out: Path, bad: int | None = None) -> None:
    resident = Resident(TensorSource(rows(bad)), batch_size=BATCH, device=ranks.device, tier="ram", seed=1, ranks=ranks)
    with resident:
        train(network(), squared, resident, config=CONFIG, out=out, transform=shaken, device="cpu", ranks=ranks)


def norms(ranks: Ranks) -> dict[str, float]:
    """Batch norms and a contrast over a share, against the whole batch in one process; in double precision."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3)).double()
    x = 3 + torch.randn(5, 2, 6, 6, dtype=torch.float64)
    shared = copy.deepcopy(whole)
    share_norms(shared)
    _coupled(whole(x)).backward()
    wrapped, share = ranks.averaging(shared), Share(ranks, 5, torch.arange(5)[ranks.rank :: 2])
    with computing(share):
        (_coupled(wrapped(x[share.places])) * share.weight).backward()
    pairs = zip(shared.parameters(), whole.parameters(), strict=True)
    found = {"gradient": max(float((mine.grad - its.grad).abs().max()) for mine, its in pairs)}
    pairs = zip(shared.buffers(), whole.buffers(), strict=True)
    return found | {"statistics": max(float((mine - its).abs().max()) for mine, its in pairs)}


def _coupled(maps: Tensor) -> Tensor:
    """A mean over items, each compared with all."""
    points = maps.mean((2, 3))
    mine = own_rows(len(points), points.device)
    return functional.cross_entropy(points @ gathered(points).T, mine)


def empty_handed(ranks: Ranks) -> dict[str, float]:
    """A batch of which rank 1 owns nothing: its stand-in counts for nothing."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3)).double()
    x = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    shared = copy.deepcopy(whole)
    share_norms(shared)
    _coupled(whole(x)).backward()
    wrapped, share = ranks.averaging(shared), Share(ranks, 3, torch.arange(3 if ranks.main else 0))
    with computing(share):
        (_coupled(wrapped(x if ranks.main else 100 * x[:1])) * share.weight).backward()
    pairs = zip(shared.parameters(), whole.parameters(), strict=True)
    return {"gradient": max(float((mine.grad - its.grad).abs().max()) for mine, its in pairs)}


def words(ranks: Ranks) -> dict[str, Any]:
    def refuse() -> None:
        raise ConfigError("depth=-1 must be at least 0")

    try:
        ranks.from_main(refuse)
    except (ConfigError, RankLost) as failure:
        said = f"{type(failure).__name__}: {failure}"
    made = ranks.from_main(lambda: ranks.rank)
    return {"error": said, "made": made, "all": ranks.all_of(ranks.rank), "greatest": ranks.greatest(ranks.rank, 5)}


def main(out: Path) -> None:
    with joined("cpu") as ranks:
        if ranks.alone:
            run(ranks, out / "run")
            return
        run(ranks, out / "run", bad=int(sys.argv[2]) if len(sys.argv) > 2 else None)
        saw = {"norms": norms(ranks), "empty": empty_handed(ranks), "words": words(ranks)}
    (out / f"{ranks.rank}.json").write_text(json.dumps(saw))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
