"""One row a step through many small layers: operations cost more than their arithmetic."""

import torch

torch.set_num_threads(1)
layers = [layer for _ in range(12) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh())]
net = torch.nn.Sequential(*layers, torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
x, y = torch.randn(4096, 1, 8), torch.randint(2, (4096, 1))
for _ in range(1000):
    for row in range(len(x)):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x[row]), y[row]).backward()
        optimizer.step()
