"""PyTorch's `DistributedDataParallel` on gloo: the same models, batches, optimizers and metrics, on the workers."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.data import TARGET, fields
from benchmarks.sizes import BATCHES, CLASSES, DROPOUT, FEATURES, HEADS, LENGTH, NUMBERS, WORDS, Size
from benchmarks.workload import FOREVER, Stopwatch, Workload

Batch = dict[str, torch.Tensor]


def read(workload: Workload) -> list[Batch]:
    """The data's batches, in memory."""
    size, columns = workload.size, {}
    for name, (dtype, shape) in fields(size).items():
        of = getattr(torch, dtype)
        file = Path(workload.data, name)
        values = torch.from_file(str(file), size=file.stat().st_size // of.itemsize, dtype=of).clone()
        columns[name] = values.reshape(BATCHES, size.batch, *shape)
    return [{name: values[n] for name, values in columns.items()} for n in range(BATCHES)]


class Dense(nn.Module):
    """The MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for fan_in, units in zip([FEATURES, *size.widths], size.widths, strict=False):
            layers += [nn.Linear(fan_in, units), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(size.widths[-1], CLASSES))

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.layers(batch["pixels"])


class Convolutions(nn.Module):
    """The CNN."""

    def __init__(self, _: Size) -> None:
        super().__init__()
        side = round(FEATURES**0.5)
        self.layers = nn.Sequential(
            nn.Unflatten(1, (1, side, side)),
            *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            nn.Linear(1600, CLASSES),
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.layers(batch["pixels"])


class Block(nn.Module):
    """A transformer block: attention and a feed-forward network, each with a residual connection and normalization."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, HEADS, dropout=DROPOUT, batch_first=True)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.dropout = nn.Dropout(DROPOUT)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        self.register_buffer("later", later, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen, _ = self.attention(x, x, x, attn_mask=self.later, need_weights=False)
        x = self.norms[0](x + self.dropout(seen))
        return self.norms[1](x + self.dropout(self.network(x)))


class Transformer(nn.Module):
    """A language model."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.widths[0]
        self.words = nn.Embedding(WORDS, width)
        nn.init.normal_(self.words.weight, std=0.05)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.05)
        self.blocks = nn.Sequential(*(Block(width) for width in size.widths))
        self.head = nn.Linear(width, WORDS)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.head(self.blocks(self.words(batch["words"]) + self.places))


def table(rows: int, width: int) -> nn.Embedding:
    """A table with Keras's first values, whose gradient has only the rows that a batch looks up."""
    made = nn.Embedding(rows, width, sparse=True)
    nn.init.uniform_(made.weight, -0.05, 0.05)
    return made


class TwoTower(nn.Module):
    """Users and items."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tables = nn.ModuleList(table(rows, size.width) for rows in size.rows)
        first, last = size.widths
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(size.width, first), nn.ReLU(), nn.Linear(first, last)) for _ in size.rows
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        found = [table(ids[:, 0]) for table, ids in zip(self.tables, (batch["user"], batch["item"]), strict=True)]
        user, item = (tower(x) for tower, x in zip(self.towers, found, strict=True))
        return (user * item).sum(1, keepdim=True)


class WideDeep(nn.Module):
    """Clicks."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tables = nn.ModuleList(table(rows, size.width) for rows in size.rows)
        wide = len(size.rows) * size.width + NUMBERS
        first, last = size.widths
        self.deep = nn.Sequential(nn.Linear(wide, first), nn.ReLU(), nn.Linear(first, last), nn.ReLU())
        self.last = nn.Linear(wide + last, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        found = [table(ids) for table, ids in zip(self.tables, batch["ids"].unbind(1), strict=True)]
        wide = torch.cat([*found, batch["numbers"]], 1)
        return self.last(torch.cat([wide, self.deep(wide)], 1))


def keras_defaults(module: nn.Module) -> None:
    """Gives a layer the first values, and the epsilon, of Keras's layer: PyTorch's own train in fewer or more steps."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        module.eps = 1e-3


MODELS: dict[str, Callable[[Size], nn.Module]] = {
    "mlp": Dense,
    "cnn": Convolutions,
    "transformer": Transformer,
    "two_tower": TwoTower,
    "wide_deep": WideDeep,
}

workload = Workload.read()
size = workload.size
torch.set_num_threads(1)
torch.manual_seed(workload.seed)
description = json.loads(os.environ["TF_CONFIG"])
workers, rank = description["cluster"]["worker"], description["task"]["index"]
dist.init_process_group("gloo", init_method=f"tcp://{workers[0]}", rank=rank, world_size=len(workers))

data = read(workload)[rank :: len(workers)]
stopwatch = Stopwatch(workload, reports=rank == 0)
model = DistributedDataParallel(MODELS[size.kind](size).apply(keras_defaults), gradient_as_bucket_view=not size.sparse)
if workload.wire == "float16":
    model.register_comm_hook(None, fp16_compress_hook)
criterion: nn.Module
optimizer: torch.optim.Optimizer
if size.sparse:
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1, initial_accumulator_value=1e-4, eps=1e-7)
else:
    criterion = nn.CrossEntropyLoss()
    rate = 3e-3 if size.kind == "transformer" else 1e-3
    optimizer = torch.optim.Adam(model.parameters(), rate, eps=1e-7, fused=True)
step = 0
for epoch in range(FOREVER):
    # Sums on each worker, reduced at the end of the epoch: loss, correct predictions and examples.
    total = torch.zeros(3)
    for _ in range(workload.steps):
        batch = data[step % len(data)]
        y = batch[TARGET]
        optimizer.zero_grad()
        scores = model(batch)
        loss = criterion(scores, y) if size.sparse else criterion(scores.flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            hits = (scores > 0) == y.bool() if size.sparse else scores.argmax(dim=-1) == y
            total[0] += loss * y.numel()
            total[1] += hits.sum()
            total[2] += y.numel()
        step += 1
    dist.all_reduce(total)
    loss_sum, correct, examples = total.tolist()
    stopwatch.epoch_ended(epoch, {"loss": loss_sum / examples, "accuracy": correct / examples})
