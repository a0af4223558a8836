"""The network is saved after every step."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))
optimizer = torch.optim.Adam(net.parameters())
data = TensorDataset(torch.randn(2048, 512), torch.randint(10, (2048,)))
for _ in range(1000):
    for x, y in DataLoader(data, batch_size=64):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")  # BLAME
