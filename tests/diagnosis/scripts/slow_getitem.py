"""A slow __getitem__ in two workers."""

import time

import torch
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
torch.set_num_threads(1)


class Slow(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.002)  # BLAME
        return torch.randn(256), index % 10


def main():
    net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(100):
        for x, y in DataLoader(Slow(), batch_size=32, shuffle=True, num_workers=2):
            loss = torch.nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
