"""Accuracy is counted with .item(), row by row."""

import torch

torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
x, y = torch.randn(512, 256), torch.randint(10, (512,))
hits = 0
for _ in range(100000):
    out = net(x)
    loss = torch.nn.functional.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    for row in (out.argmax(1) == y).int():
        hits += row.item()  # BLAME
    optimizer.step()
