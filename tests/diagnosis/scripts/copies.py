"""Batches are converted back and forth, and on a GPU copied from pageable memory."""

import torch

torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
net = torch.nn.Linear(8192, 10).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
rows = torch.randint(256, (1024, 8192), dtype=torch.uint8)
y = torch.randint(10, (256,)).to(device)
for step in range(100000):
    x = rows[step % 4 * 256 :][:256]
    x = x.to(torch.float64).to(device, torch.float32)  # BLAME
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
