"""Convolutions in fp32 take all the time."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
net = torch.nn.Sequential(
    torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3), torch.nn.AdaptiveAvgPool2d(1),
    torch.nn.Flatten(), torch.nn.Linear(32, 10),
).to(device)  # fmt: skip
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
data = TensorDataset(torch.randn(256, 3, 40, 40), torch.randint(10, (256,)))
for _ in range(1000):
    for x, y in DataLoader(data, batch_size=32):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x.to(device)), y.to(device)).backward()
        optimizer.step()
