"""Your module, optimiser and TensorDataset: python examples/own_module.py (seconds on a CPU; a GPU if there is one)."""

import torch

import brim

x = torch.randn(50_000, 64)
data = brim.Resident(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=256)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
report = brim.train(
    model, torch.nn.MSELoss(), data, out="run", epochs=4, optimizer=lambda params: torch.optim.SGD(params, 0.1)
)
print(report)
