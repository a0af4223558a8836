"""Four steps an epoch, then an evaluation that is much longer."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
train = TensorDataset(torch.randn(512, 256), torch.randint(10, (512,)))
held_out = TensorDataset(torch.randn(2048, 256), torch.randint(10, (2048,)))


def evaluate():
    net.eval()
    with torch.no_grad():
        hits = sum((net(x).argmax(1) == y).sum().item() for x, y in DataLoader(held_out, batch_size=64))  # BLAME
    net.train()
    return hits / len(held_out)


for _ in range(10000):
    for x, y in DataLoader(train, batch_size=128, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    evaluate()
