"""Threads load batches, but need a lock that the training holds."""

import queue
import threading
import time

import torch

torch.set_num_threads(1)
lock, batches = threading.Lock(), queue.Queue(maxsize=4)


def load():
    while True:
        with lock:
            time.sleep(0.01)
            batch = torch.randn(64, 256), torch.randint(10, (64,))
        batches.put(batch)


for _ in range(2):
    threading.Thread(target=load, daemon=True).start()
net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(100000):
    x, y = batches.get()  # BLAME
    with lock:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
