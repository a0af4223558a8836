"""Data in memory, a step of arithmetic."""

import torch

torch.manual_seed(0)
torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
net = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
rows, labels = torch.randn(2048, 512, device=device), torch.randint(10, (2048,), device=device)
for step in range(100000):
    chosen = torch.randint(2048, (256,), device=device)
    loss = torch.nn.functional.cross_entropy(net(rows[chosen]), labels[chosen])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        pass
