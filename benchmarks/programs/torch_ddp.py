"""PyTorch's `DistributedDataParallel` on gloo: the same model, batches, optimizer and metrics, on the workers."""

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workload import (
    BATCHES,
    BLOCKS,
    CLASSES,
    DROPOUT,
    FEATURES,
    FOREVER,
    HEADS,
    HIDDEN,
    LENGTH,
    MODEL_WIDTH,
    SEEN,
    WORDS,
    Stopwatch,
    Workload,
)


def batches(workload: Workload) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The data of `benchmarks.programs.data` as tensors in memory."""
    torch.manual_seed(0)
    if workload.model == "transformer":
        words = torch.randint(SEEN, (BATCHES, workload.batch_size, LENGTH))
        return list(zip(words.unbind(), ((words + 1) % SEEN).unbind(), strict=True))
    pixels = torch.rand(BATCHES, workload.batch_size, FEATURES) - 0.5
    labels = (pixels @ torch.randn(FEATURES, CLASSES)).argmax(dim=2)
    return list(zip(pixels.unbind(), labels.unbind(), strict=True))


def mlp() -> nn.Module:
    sizes = [FEATURES, *HIDDEN]
    layers: list[nn.Module] = []
    for fan_in, units in zip(sizes, HIDDEN, strict=False):
        layers += [nn.Linear(fan_in, units), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(HIDDEN[-1], CLASSES))


class Block(nn.Module):
    """A transformer block: attention and a feed-forward network, each with a residual connection and normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(MODEL_WIDTH, HEADS, dropout=DROPOUT, batch_first=True)
        self.network = nn.Sequential(
            nn.Linear(MODEL_WIDTH, 4 * MODEL_WIDTH), nn.ReLU(), nn.Linear(4 * MODEL_WIDTH, MODEL_WIDTH)
        )
        self.norms = nn.ModuleList([nn.LayerNorm(MODEL_WIDTH) for _ in range(2)])
        self.dropout = nn.Dropout(DROPOUT)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        self.register_buffer("later", later, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen, _ = self.attention(x, x, x, attn_mask=self.later, need_weights=False)
        x = self.norms[0](x + self.dropout(seen))
        return self.norms[1](x + self.dropout(self.network(x)))


class Transformer(nn.Module):
    """A language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, MODEL_WIDTH)
        nn.init.normal_(self.words.weight, std=0.05)
        self.places = nn.Parameter(torch.randn(LENGTH, MODEL_WIDTH) * 0.05)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.head = nn.Linear(MODEL_WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(words) + self.places))


workload = Workload.read()
torch.set_num_threads(1)
description = json.loads(os.environ["TF_CONFIG"])
workers, rank = description["cluster"]["worker"], description["task"]["index"]
dist.init_process_group("gloo", init_method=f"tcp://{workers[0]}", rank=rank, world_size=len(workers))

data = batches(workload)
stopwatch = Stopwatch(workload, reports=rank == 0)
model = DistributedDataParallel(
    Transformer() if workload.model == "transformer" else mlp(), gradient_as_bucket_view=True
)
optimizer = torch.optim.Adam(model.parameters(), 3e-3 if workload.model == "transformer" else 1e-3, fused=True)
criterion = nn.CrossEntropyLoss()
step = 0
for epoch in range(FOREVER):
    # Sums on each worker, reduced at the end of the epoch: loss, correct predictions and examples.
    total = torch.zeros(3)
    for _ in range(workload.steps):
        x, y = data[step % BATCHES]
        optimizer.zero_grad()
        scores = model(x)
        loss = criterion(scores.flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            total[0] += loss * y.numel()
            total[1] += (scores.argmax(dim=-1) == y).sum()
            total[2] += y.numel()
        step += 1
    dist.all_reduce(total)
    loss_sum, hits, examples = total.tolist()
    stopwatch.epoch_ended(epoch, {"loss": loss_sum / examples, "accuracy": hits / examples})
