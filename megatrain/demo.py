"""The demo: a small language model learns English with less device memory than its own weights take."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

import megatrain
from megatrain.errors import OptionError
from megatrain.sizes import format_bytes, parse_bytes

NUM_BYTES = 256
# Every model config takes it, but no config class declares it.
_SDPA: dict[str, Any] = {"attn_implementation": "sdpa"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the demo trains, and with how much.

    Args:
        device: Compute device; None takes the accelerator if there is one, else the CPU.
        memory: Device-memory budget, an int of bytes or a text such as `"10MiB"`.
        steps: Optimizer steps.
        seconds: Training ends after this time even if steps are left.
        batch_size: Windows of text per step.
        context: Bytes per window.
        width: Size of the model's hidden states; a multiple of 64, the size of an attention head.
        depth: Decoder layers.
        learning_rate: Its peak; it warms up, then falls along a cosine.
        warmup_steps: Steps of the warm-up.
        sample_bytes: Length of the text that the trained model writes.
        seed: Fixes the weights, the order of the text and the sample.
    """

    device: str | None = None
    memory: int | str = "18MiB"
    steps: int = 900
    seconds: float = 225.0
    batch_size: int = 2
    context: int = 128
    width: int = 256
    depth: int = 12
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    sample_bytes: int = 400
    seed: int = 0


def read_corpus() -> tuple[bytes, bytes]:
    """Returns the help texts of Python itself: nine tenths to train on, the rest held out.

    Topics quote each other at length, so a paragraph counts only where it stands first; otherwise much of the
    held-out part would have been seen in training.
    """
    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    text = "\n\n".join(dict.fromkeys(p for p in paragraphs if p.strip())).encode()
    end = len(text) * 9 // 10
    return text[:end], text[end:]


def unigram_entropy(training: bytes, held_out: bytes) -> float:
    """Nats per held-out byte under the byte frequencies of the training text, each count raised by one."""
    counts = Counter(training)
    total = len(training) + NUM_BYTES
    return -sum(n * math.log((counts[b] + 1) / total) for b, n in Counter(held_out).items()) / len(held_out)


def byte_tensor(text: bytes) -> torch.Tensor:
    """Returns the text as int64 token ids."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def random_batches(ids: torch.Tensor, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Yields `[batch_size, context]` windows of the text, without end and in an order fixed by the seed."""
    order = torch.Generator().manual_seed(recipe.seed)
    while True:
        starts = torch.randint(len(ids) - recipe.context + 1, (recipe.batch_size,), generator=order)
        yield torch.stack([ids[s : s + recipe.context] for s in starts.tolist()])


def build_model(recipe: Recipe) -> nn.Module:
    """Returns an unmodified Hugging Face decoder with random weights on the CPU.

    Raises:
        OptionError: If transformers is not installed.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise  # it is there, but broken: its own message says how
        raise OptionError(
            "The demo trains a Hugging Face model, and transformers is not installed.\n"
            '  It is an optional dependency: pip install "megatrain[hf]"'
        ) from error
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=NUM_BYTES,
        hidden_size=recipe.width,
        intermediate_size=recipe.width * 11 // 4,
        num_hidden_layers=recipe.depth,
        num_attention_heads=max(1, recipe.width // 64),
        num_key_value_heads=max(1, recipe.width // 64),
        max_position_embeddings=recipe.context,
        use_cache=False,
        **_SDPA,
    )
    return LlamaForCausalLM(config)


def learning_rate(recipe: Recipe, step: int, progress: float) -> float:
    """Returns the rate of a step: a linear warm-up, then a cosine down to a tenth of the peak.

    `progress` is the part of the training that is over, 0 to 1.
    """
    cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return recipe.learning_rate * cosine * min(1.0, (step + 1) / recipe.warmup_steps)


def train(model: nn.Module, text: bytes, recipe: Recipe, device: torch.device) -> tuple[int, float]:
    """Trains until the steps or the seconds are used up.

    Args:
        model: The compiled model, or any other that returns an output with a `loss`.
        text: What to learn.
        recipe: How.
        device: Where the model takes its inputs.

    Returns:
        Steps made, at least one, and the seconds they took.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    batches = random_batches(byte_tensor(text), recipe)
    num_tokens = recipe.batch_size * recipe.context
    start, num_steps = time.perf_counter(), 0
    model.train()
    with tqdm(total=recipe.steps * num_tokens, desc="training", unit="tok", unit_scale=True) as bar:
        for step in range(recipe.steps):
            spent = (time.perf_counter() - start) / recipe.seconds
            if spent >= 1 and step > 0:
                break
            num_steps = step + 1
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(recipe, step, max(spent, step / recipe.steps))
            ids = next(batches).to(device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            bar.update(num_tokens)
    return num_steps, time.perf_counter() - start


@torch.no_grad()
def held_out_loss(model: nn.Module, text: bytes, recipe: Recipe, device: torch.device) -> float:
    """Returns nats per byte over the text, cut into windows; each window's first byte is only read."""
    ids = byte_tensor(text)
    num_windows = len(ids) // (recipe.context * recipe.batch_size) * recipe.batch_size
    if num_windows == 0:
        raise OptionError(
            f"The held-out text has {len(ids)} bytes, too few for one batch. Take a smaller batch or context."
        )
    batches = ids[: num_windows * recipe.context].view(-1, recipe.batch_size, recipe.context).to(device)
    model.eval()
    losses = [model(input_ids=batch, labels=batch).loss.item() for batch in batches]
    return sum(losses) / len(losses)


@torch.no_grad()
def write_sample(
    model: nn.Module, prompt: bytes, recipe: Recipe, device: torch.device, *, temperature: float = 0.7
) -> str:
    """Lets the model continue `prompt`, one byte at a time, each drawn at the given temperature.

    The window keeps one shape, padded on the right, so one compiled variant serves every step; attention is
    causal, so what pads can't be seen.
    """
    model.eval()
    text = list(prompt)
    draw = torch.Generator().manual_seed(recipe.seed)
    for _ in tqdm(range(recipe.sample_bytes), desc="sampling", unit="B", leave=False):
        seen = text[-recipe.context :]
        window = torch.tensor([seen + [0] * (recipe.context - len(seen))], device=device)
        logits = model(input_ids=window).logits[0, len(seen) - 1].float().cpu()
        text.append(int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=draw)))
    return bytes(text).decode(errors="replace")


def state_bytes(model: nn.Module) -> int:
    """Returns the bytes of the model's parameters and buffers, a shared tensor once."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def format_table(rows: Sequence[tuple[str, str]]) -> str:
    """Returns two aligned columns, indented."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def format_memory(weights: int, budget: int, schedule: megatrain.Schedule, measured: int) -> str:
    """Returns the device's peak beside the budget and the model's own size.

    What is measured is what the schedule places: slots, values between blocks, gradients. The budget has to
    hold the workspace inside the largest block as well.
    """

    def row(nbytes: int) -> str:
        return f"{format_bytes(nbytes)}, {nbytes / weights:.0%} of the weights"

    return format_table(
        [
            (
                "weights",
                f"{format_bytes(weights)}, on the host; {format_bytes(4 * weights)} with gradients and AdamW",
            ),
            ("budget", row(budget)),
            ("the schedule's peak", row(schedule.peak_bytes)),
            ("measured peak", row(measured)),
            ("with workspace inside blocks", f"{row(schedule.device_bytes)}, by the schedule"),
        ]
    )


def run(recipe: Recipe) -> bool:
    """Trains, measures, samples, shows the schedule that ran and verifies it; prints all of it.

    Returns:
        Whether the model learnt, the device stayed within the budget, and the gradients are eager PyTorch's.
    """
    budget = parse_bytes(recipe.memory)
    training, held_out = read_corpus()
    model = build_model(recipe)
    compiled = megatrain.compile(model, device=recipe.device, memory=budget, transfer="copy")
    device = compiled.options.device
    weights = state_bytes(model)
    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, {format_bytes(weights)}"
    print(f"model   {type(model).__name__}, {size}")
    print(f"text    Python's own help pages: {len(training)} bytes to train on, {len(held_out)} held out")
    print(f"device  {device}, with a budget of {format_bytes(budget)}", flush=True)
    first = next(random_batches(byte_tensor(training), recipe)).to(device)
    model.train()
    plan = compiled.prepare(input_ids=first, labels=first)
    blocks, templates = len(plan.program.blocks), len(plan.program.templates)
    print(f"plan    {blocks} blocks over {templates} templates, {len(plan.schedule.ticks)} ticks a step\n", flush=True)

    num_steps, seconds = train(compiled, training, recipe, device)
    schedule = compiled.schedule
    num_tokens = num_steps * recipe.batch_size * recipe.context
    print(f"\n{num_steps} steps, {num_tokens} tokens in {seconds:.0f} s, {num_tokens / seconds:.0f} tokens/s")

    loss, baseline = held_out_loss(compiled, held_out, recipe, device), unigram_entropy(training, held_out)
    print(f"\nheld-out loss, nats per byte\n{_loss_table(loss, baseline)}", flush=True)
    print(f"\na sample it wrote\n{_quoted(write_sample(compiled, b'The ', recipe, device))}")
    print(f"\nthe schedule of a training step\n{schedule}")
    measured = compiled.peak_bytes
    print(f"\ndevice memory\n{format_memory(weights, budget, schedule, measured)}\n", flush=True)
    report = _verify(model, training, recipe, compiled)
    print(report)
    return loss < baseline and measured <= budget and report.ok


def _loss_table(loss: float, baseline: float) -> str:
    return format_table(
        [
            ("this model", f"{loss:.3f}"),
            ("unigram baseline", f"{baseline:.3f}"),
            ("uniform bytes", f"{math.log(NUM_BYTES):.3f}"),
        ]
    )


def _quoted(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())


def _verify(model: nn.Module, text: bytes, recipe: Recipe, compiled: megatrain.CompiledModule) -> megatrain.Report:
    """Compares with eager PyTorch under the options that the training ran with."""
    options = compiled.options
    ids = next(random_batches(byte_tensor(text), recipe)).to(options.device)
    model.train()
    same = {"device": options.device, "memory": options.memory, "transfer": options.transfer}
    return megatrain.verify(model, compile_options=same, input_ids=ids, labels=ids)
