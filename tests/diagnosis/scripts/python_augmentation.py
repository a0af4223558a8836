"""Rows are mirrored one by one in the training loop."""

import random

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


def augment(x):
    rows = []
    for row in x:
        values = row.tolist()
        if random.random() < 0.5:
            values.reverse()
        rows.append([value + random.gauss(0, 0.1) for value in values])  # BLAME
    return torch.tensor(rows)


net = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
data = TensorDataset(torch.randn(2048, 512), torch.randint(10, (2048,)))
for _ in range(1000):
    for x, y in DataLoader(data, batch_size=64, shuffle=True):
        x = augment(x)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
