"""Train a small mixture-of-experts language model, byte by byte, on the language reference that ships with Python.

    python examples/train_moe.py                # two minutes on two CPU cores
    python examples/train_moe.py --device cuda  # the same model on CUDA kernels

Wherever tk has an operator, the model uses it: ``moe.topk_gate`` selects the experts, ``layers.normalize_weight``
scales their weights, ``quant.per_token_cast`` and ``per_token_cast_back`` round expert inputs to FP8 and back, and the
layers SwiGLU, RMSNorm and RotaryEmbedding compute activations, norms and positions. Matrix products, attention and the
loss are PyTorch. The run ends with a verdict, and a non-zero exit code if it fails: the held-out loss must beat a
bigram model of the same data, and every parameter must have received a gradient.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import pydoc_data.topics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import tk_core
from tk_core.layers import RMSNorm, RotaryEmbedding, SwiGLU, normalize_weight
from tk_core.moe import topk_gate
from tk_core.quant import per_token_cast, per_token_cast_back

VOCABULARY = 256  # bytes
GROUP = 32  # channels that share one FP8 scale
FIRST_STEPS, FIRST_BOUND = 20, 0.02  # curves of two backends: each of the first losses, in nats
LAST_STEPS, LAST_BOUND = 50, 0.05  # and the mean of the last ones, once rounding has had time to grow


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of its training."""

    width: int = 128
    heads: int = 4
    layers: int = 2
    experts: int = 8
    topk: int = 2
    expert_width: int = 128
    context: int = 128
    batch: int = 16
    steps: int = 400
    learning_rate: float = 4e-3
    bias_rate: float = 2e-3


# ------------------------------------------------------------ operators as layers


class FakeQuantize(torch.autograd.Function):
    """Round to FP8 and back; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return per_token_cast_back(per_token_cast(x, "e4m3", GROUP, round_sf=True), "fp32", GROUP)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


# ------------------------------------------------------------ model


class MixtureOfExperts(nn.Module):
    """Top-k of sigmoid scores; a bias per expert, nudged after each step, keeps the load even without a loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        experts, width, inner = config.experts, config.width, config.expert_width
        self.router = nn.Linear(width, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, width, inner) * (2 * config.layers * inner) ** -0.5)
        self.activation = SwiGLU()
        self.bias: Tensor
        self.load: Tensor
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.sigmoid(self.router(x))
        ids = topk_gate(scores.detach() + self.bias, self.config.topk)
        weights = normalize_weight(scores.gather(1, ids))[1]
        order = torch.sort(ids.flatten(), stable=True).indices  # token and k of each row, by expert
        load = torch.bincount(ids.flatten(), minlength=self.config.experts)
        rows = FakeQuantize.apply(x)[order // self.config.topk]
        outputs = [self._expert(e, part) for e, part in enumerate(rows.split(load.tolist()))]
        by_token = torch.empty_like(rows).index_copy(0, order, torch.cat(outputs))
        if self.training:
            self.load.copy_(load)
        return (by_token.view(len(x), self.config.topk, -1) * weights[:, :, None]).sum(1)

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        return F.linear(self.activation(F.linear(x, self.gate_up[expert])), self.down[expert])

    def balance(self) -> None:
        """Raise the bias of experts with less than the mean load, lower that of the others (DeepSeek-V3, 2.1.2)."""
        self.bias += self.config.bias_rate * torch.sign(self.load.mean() - self.load)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        nn.init.normal_(self.out.weight, std=(2 * config.layers * config.width) ** -0.5)
        self.rotary = RotaryEmbedding(config.width // config.heads, config.context)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).unbind(2)
        q, k = self.rotary(q, k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then experts, each on a normalized residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config)
        self.experts_norm = RMSNorm(config.width)
        self.experts = MixtureOfExperts(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.experts(self.experts_norm(x).flatten(0, 1)).view_as(x)


class LanguageModel(nn.Module):
    """Logits of the next byte."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy, in nats, of the bytes after the first of each window."""
        return F.cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


# ------------------------------------------------------------ data


def read_text() -> Tensor:
    """The topics of Python's help(), in the order of their names, as bytes."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def split(text: Tensor) -> tuple[Tensor, Tensor]:
    """The first nine tenths for training, the rest held out."""
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def bigram_loss(train: Tensor, held_out: Tensor) -> float:
    """Nats per byte of a bigram model counted on one text and tested on another."""
    counts = torch.bincount(train[:-1] * VOCABULARY + train[1:], minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY)
    smoothed = counts.double() + 0.05
    log_probability = (smoothed / smoothed.sum(1, keepdim=True)).log()
    return -float(log_probability[held_out[:-1], held_out[1:]].mean())


def batches(train: Tensor, config: Config, seed: int) -> Iterator[Tensor]:
    """Windows at random places, one byte longer than the context; the same ones on every device."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(config.context + 1)
    while True:
        starts = torch.randint(len(train) - config.context, (config.batch, 1), generator=generator)
        yield train[starts + offsets]


# ------------------------------------------------------------ training


@dataclass
class Run:
    """What training leaves behind."""

    losses: list[float]
    seconds: float
    without_gradient: list[str]


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up over a twentieth of the steps, then a cosine down to a twentieth of the rate."""
    warm = max(1, config.steps // 20)
    if step < warm:
        return config.learning_rate * (step + 1) / warm
    done = (step - warm) / max(1, config.steps - warm)
    return config.learning_rate * (0.525 + 0.475 * math.cos(math.pi * done))


def train(model: LanguageModel, text: Tensor, seed: int, console: Console) -> Run:
    """AdamW on random windows."""
    config = model.config
    device = model.head.weight.device
    fused = device.type in ("cpu", "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05, fused=fused)
    untouched = dict(model.named_parameters())
    losses: list[float] = []
    began = time.perf_counter()
    columns = ("{task.description}", "{task.completed}/{task.total} steps", "loss {task.fields[loss]:.3f}")
    layout = (TextColumn(columns[0]), BarColumn(), *map(TextColumn, columns[1:]))
    with Progress(
        *layout, TextColumn("{task.fields[speed]:,.0f} tokens/s"), TimeRemainingColumn(), console=console
    ) as bar:
        task = bar.add_task("training", total=config.steps, loss=math.nan, speed=0.0)
        for step, windows in zip(range(config.steps), batches(text, config, seed)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step)
            optimizer.zero_grad(set_to_none=True)
            loss = model.loss(windows.to(device))
            loss.backward()
            for name in [n for n, p in untouched.items() if p.grad is not None and bool(p.grad.any())]:
                del untouched[name]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            for module in model.modules():
                if isinstance(module, MixtureOfExperts):
                    module.balance()
            losses.append(float(loss.detach()))
            speed = (step + 1) * config.batch * config.context / (time.perf_counter() - began)
            bar.update(task, advance=1, loss=losses[-1], speed=speed)
            if not console.is_terminal and (step + 1) % max(1, config.steps // 10) == 0:
                console.print(f"step {step + 1}/{config.steps}  loss {losses[-1]:.3f}  {speed:,.0f} tokens/s")
    return Run(losses, time.perf_counter() - began, list(untouched))


@torch.no_grad()
def evaluate(model: LanguageModel, text: Tensor) -> float:
    """Mean loss over consecutive windows of a text."""
    length = model.config.context + 1
    windows = text[: len(text) // length * length].view(-1, length).to(model.head.weight.device)
    model.eval()
    losses = [model.loss(part) * len(part) for part in windows.split(64)]
    model.train()
    return float(sum(losses)) / len(windows)


@torch.no_grad()
def generate(model: LanguageModel, prompt: str, length: int, seed: int, temperature: float = 0.7) -> str:
    """Continue a prompt."""
    generator = torch.Generator().manual_seed(seed)
    device = model.head.weight.device
    tokens = torch.tensor([list(prompt.encode())], device=device)
    model.eval()
    for _ in range(length):
        logits = model(tokens[:, -model.config.context :])[0, -1].cpu()
        drawn = torch.multinomial(torch.softmax(logits / temperature, dim=0), 1, generator=generator)
        tokens = torch.cat((tokens, drawn.to(device)[None]), dim=1)
    model.train()
    return bytes(tokens[0].tolist()).decode(errors="replace")


# ------------------------------------------------------------ report


def plot(losses: list[float], held_out: float, bigram: float, path: pathlib.Path) -> None:
    """The loss curve as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    window = max(1, len(losses) // 50)
    smooth = torch.tensor(losses).unfold(0, window, 1).mean(1).tolist()
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(losses, color="0.8", linewidth=0.8, label="training loss of each batch")
    axes.plot(range(window - 1, len(losses)), smooth, color="C0", label=f"mean of {window} batches")
    axes.axhline(bigram, color="C3", linestyle="--", linewidth=1, label=f"bigram model, held out: {bigram:.3f}")
    axes.axhline(held_out, color="C2", linewidth=1, label=f"this model, held out: {held_out:.3f}")
    top, bottom = max(losses[0], bigram + 0.5), min(*losses, held_out, bigram) - 0.1
    axes.set(xlabel="step", ylabel="nats per byte", ylim=(bottom, top))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def calls_table(calls: dict[tuple[str, str], int]) -> Table:
    """Which backend served each operator."""
    table = Table("operator", "backend", "calls", title="who computed")
    for (operator, backend), count in sorted(calls.items()):
        table.add_row(operator, backend, f"{count:,}")
    return table


def disagreement(losses: list[float], other: list[float]) -> str | None:
    """How two seeded curves of different backends disagree beyond the bounds, or None."""
    if len(losses) != len(other):
        return f"{len(losses)} steps here, {len(other)} in the other curve"
    first = max(abs(a - b) for a, b in zip(losses[:FIRST_STEPS], other))
    if first > FIRST_BOUND:
        return f"the first {FIRST_STEPS} losses differ by up to {first:.4f} nats, allowed are {FIRST_BOUND}"
    last = abs(sum(losses[-LAST_STEPS:]) - sum(other[-LAST_STEPS:])) / len(losses[-LAST_STEPS:])
    if last > LAST_BOUND:
        return f"the means of the last {LAST_STEPS} losses differ by {last:.4f} nats, allowed are {LAST_BOUND}"
    return None


def verdicts(run: Run, held_out: float, bigram: float) -> list[tuple[bool, str]]:
    """Each condition of success with a sentence."""
    missing = ", ".join(run.without_gradient)
    return [
        (held_out < bigram, f"held-out loss {held_out:.3f} nats per byte; a bigram model has {bigram:.3f}"),
        (not missing, f"no gradient reached {missing}" if missing else "every parameter received a nonzero gradient"),
    ]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description="Train a small mixture-of-experts language model on tk operators.")
    on_gpu = torch.cuda.is_available() and bool(tk_core.backends.chosen("cuda"))
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", help="default: %(default)s")
    parser.add_argument("--backend", help="backend to use instead of the default one, such as reference")
    parser.add_argument(
        "--fallback", default="error", choices=("error", "reference"), help="for operators that the backend lacks"
    )
    parser.add_argument("--steps", type=int, default=Config.steps, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=300, help="bytes of text to generate; default: %(default)s")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"), help="folder for loss.png, loss.json")
    parser.add_argument("--compare", type=pathlib.Path, help="loss.json of another backend; fail if the curves differ")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    return options


def main(argv: list[str] | None = None) -> int:
    """Train, report, judge; returns the exit code."""
    options = arguments(argv)
    console = Console()
    torch.manual_seed(options.seed)
    config = Config(steps=options.steps)
    training, held = split(read_text())
    bigram = bigram_loss(training, held)
    model = LanguageModel(config).to(options.device)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"{parameters:,} parameters, {config.experts} experts in each of {config.layers} layers, {config.topk} active; "
        f"{len(training):,} bytes of text to train on, {len(held):,} held out; device {options.device}"
    )
    chosen = (options.backend,) if options.backend else ()
    with tk_core.use_backend(*chosen, fallback=options.fallback), tk_core.backends.count_calls() as calls:
        run = train(model, training, options.seed, console)
        held_out = evaluate(model, held)
        sample = generate(model, "The ", options.sample, options.seed)
    console.rule("a sample of generated text")
    console.print(sample, markup=False, highlight=False)
    console.rule()
    console.print(calls_table(calls))
    options.out.mkdir(parents=True, exist_ok=True)
    plot(run.losses, held_out, bigram, options.out / "loss.png")
    record = {"device": options.device, "seed": options.seed, "held_out": held_out, "bigram": bigram}
    (options.out / "loss.json").write_text(json.dumps({**record, "losses": run.losses}, indent=1) + "\n")
    console.print(f"{run.seconds:.0f} s of training; loss curve in {options.out / 'loss.png'} and loss.json")
    judged = verdicts(run, held_out, bigram)
    if options.compare is not None:
        difference = disagreement(run.losses, json.loads(options.compare.read_text())["losses"])
        judged.append((difference is None, difference or f"the curve agrees with {options.compare}"))
    for passed, sentence in judged:
        console.print(f"[green]passed[/] {sentence}" if passed else f"[red]FAILED[/] {sentence}", highlight=False)
    return 0 if all(passed for passed, _ in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
