"""Your own training loop with the resident dataset: rows held where the device can index them, no DataLoader.

python examples/resident_loop.py     a few seconds on one CPU core; on a GPU the same code holds the data in VRAM
"""

import time

import torch
from torch import Tensor, nn

from brim.engine.device import resolve_device, stream
from brim.engine.rows import Resident, TensorSource, as_dataloader

EPOCHS = 5


def main() -> None:
    """Fit a small network to a synthetic function, then show that the order of rows depends only on seed and epoch."""
    device = resolve_device("auto")
    source = TensorSource(make_rows(20_000))  # or DatasetSource("data"), a folder of .npy, a SQL query
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimiser = torch.optim.AdamW(module.parameters(), lr=3e-3)

    with Resident(source, batch_size=256, device=device, seed=3) as data:
        print(f"{data.num_items} rows in tier {data.tier}, {data.num_batches} batches")
        for epoch in range(EPOCHS):
            began_s, total = time.perf_counter(), torch.zeros((), device=device)
            for batch in data.epoch(epoch):  # dicts of tensors that are already on the device
                loss = nn.functional.mse_loss(module(batch["x"]).squeeze(-1), batch["y"])
                optimiser.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                total += loss.detach()  # no .item() in the loop: the host does not wait for the device
            mean = float(total) / data.num_batches
            print(f"epoch {epoch}: loss {mean:.4f}, {data.num_items / (time.perf_counter() - began_s):,.0f} rows/s")

        rest = list(data.epoch(2, start_batch=data.num_batches - 1))  # start in the middle, as a resumed run does
        whole = list(data.epoch(2))
        assert torch.equal(rest[0]["x"], whole[-1]["x"])
        print(f"the last batch of epoch 2 has the same {len(rest[0]['y'])} rows when the epoch starts there")
        print(f"rows from as_dataloader: {sum(len(batch['y']) for batch in as_dataloader(data))}")


def make_rows(count: int) -> dict[str, Tensor]:
    """Random inputs and the targets to learn.

    x  (N, 8)  float32
    y  (N,)    float32
    """
    x = torch.randn(count, 8, generator=stream(7, "example", device=torch.device("cpu")))
    return {"x": x, "y": torch.sin(x[:, 0]) * x[:, 1] + 0.1 * x.square().sum(-1)}


if __name__ == "__main__":
    main()
