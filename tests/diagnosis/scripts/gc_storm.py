"""A million small objects are kept, and the garbage is collected at every step."""

import gc

import torch

torch.set_num_threads(1)
kept = [[k] for k in range(200_000)]
net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
x, y = torch.randn(256, 256), torch.randint(10, (256,))
for _ in range(100000):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    gc.collect()  # BLAME
