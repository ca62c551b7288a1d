"""PyTorch's `DistributedDataParallel` on gloo: the same model, batches, optimizer and metrics, on the workers."""

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workload import BATCHES, CLASSES, FEATURES, FOREVER, HIDDEN, Stopwatch, Workload


def batches(workload: Workload) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What `benchmarks.programs.data` makes, as tensors in memory."""
    torch.manual_seed(0)
    pixels = torch.rand(BATCHES, workload.batch_size, FEATURES) - 0.5
    labels = (pixels @ torch.randn(FEATURES, CLASSES)).argmax(dim=2)
    return list(zip(pixels.unbind(), labels.unbind(), strict=True))


def mlp() -> nn.Module:
    sizes = [FEATURES, *HIDDEN]
    layers: list[nn.Module] = []
    for fan_in, units in zip(sizes, HIDDEN, strict=False):
        layers += [nn.Linear(fan_in, units), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(HIDDEN[-1], CLASSES))


workload = Workload.read()
torch.set_num_threads(1)
description = json.loads(os.environ["TF_CONFIG"])
workers, rank = description["cluster"]["worker"], description["task"]["index"]
dist.init_process_group("gloo", init_method=f"tcp://{workers[0]}", rank=rank, world_size=len(workers))

data = batches(workload)
stopwatch = Stopwatch(workload, reports=rank == 0)
model = DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
criterion = nn.CrossEntropyLoss()
step = 0
for epoch in range(FOREVER):
    # Sums on each worker, brought together at the end of the epoch: loss, hits and examples.
    total = torch.zeros(3)
    for _ in range(workload.steps):
        x, y = data[step % BATCHES]
        optimizer.zero_grad()
        scores = model(x)
        loss = criterion(scores, y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            total[0] += loss * len(y)
            total[1] += (scores.argmax(dim=1) == y).sum()
            total[2] += len(y)
        step += 1
    dist.all_reduce(total)
    loss_sum, hits, examples = total.tolist()
    stopwatch.epoch_ended(epoch, {"loss": loss_sum / examples, "accuracy": hits / examples})
