"""Two ranks, one of which gets four times the rows; run with torchrun."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rows = 1024 if dist.get_rank() == 1 else 64
net = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
x, y = torch.randn(rows, 512), torch.randint(10, (rows,))
for _ in range(100000):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
