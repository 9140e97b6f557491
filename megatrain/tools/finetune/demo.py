"""`megatrain demo`: a small language model learns to sort digits within less memory than its weights, as eager would.

An example to read: task, model, a `TrainStep`, its checkpoints and the comparison. Halfway it may interrupt itself, as
Ctrl-C would; another process goes on from the checkpoint, with the bits of an undisturbed run.
"""

from __future__ import annotations

import math
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import megatrain
from megatrain import files as saving
from megatrain.base.counts import counted
from megatrain.base.sizes import format_bytes, parse_bytes
from megatrain.errors import CheckpointError, OptionError
from megatrain.files.replace import present

FOLDER = Path("megatrain-demo")
MEMORY, STEPS = "4MiB", 160
DIGITS, SORTED, WIDTH, DEPTH = 6, 10, 128, 8
MICRO_BATCHES, SAMPLES, SAVE_EVERY, PRINT_EVERY_S = 4, 12, 60, 3.0


def demonstrate(
    *,
    folder: str | Path = FOLDER,
    resume: bool = False,
    interrupt_at: float | None = None,
    device: str | None = None,
    memory: str | None = None,
    steps: int | None = None,
) -> int:
    """Trains, and shows what ran; prints all of it.

    Returns:
        0 if the loss fell, the device stayed within the budget, and the gradients are eager PyTorch's; else 1.

    Raises:
        CheckpointError: If the folder has no checkpoint to resume, or something else than one to replace.
        OptionError: If another number of steps is given than the checkpoint's, or transformers isn't installed.
        KeyboardInterrupt: Saying what is saved, if something is.
    """
    print("megatrain demo: a small Llama learns to sort digits within less memory than its weights", flush=True)
    folder = Path(folder)
    found = _recorded(folder) if resume or present(folder.resolve()).exists() else None
    if resume and found is not None and steps not in (None, found["steps"]):
        raise OptionError(
            f"--steps {steps} is given, but the training in `{folder}` has {found['steps']}.\n"
            "  The learning rate of a step depends on how many there are.\n  Leave --steps out, or begin anew."
        )
    begun = found if resume and found is not None else {"steps": steps or STEPS, "losses": []}
    return int(not _demonstrate(folder, resume, interrupt_at, device, parse_bytes(memory or MEMORY), begun))


def _demonstrate(
    folder: Path, resume: bool, interrupt_at: float | None, device: str | None, budget: int, begun: dict[str, Any]
) -> bool:
    steps, losses = begun["steps"], begun["losses"]
    model = build_model()
    compiled = megatrain.compile(model, device=device, memory=budget, transfer="copy")
    target = compiled.megatrain.options.device.torch_device
    weights = sum(p.nbytes for p in model.parameters())
    print(f"model   {type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters")
    print(f"memory  {format_bytes(budget)} of {target}; the weights alone take {format_bytes(weights)}", flush=True)

    optimizer = torch.optim.AdamW(compiled.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    loss = None if interrupt_at is None else _Interrupting(max(1, int(interrupt_at * steps)))
    options: dict[str, Any] = {"max_grad_norm": 1.0, "loss": loss}
    if resume:
        step = megatrain.TrainStep.load(folder, compiled, optimizer, **options)
        print(f"resume  from `{folder}`: step {step.progress.count} of {steps}")
    else:
        step = megatrain.TrainStep(compiled, optimizer, **options)
    compiled.train()
    batch = _batches(step.progress.count, target)
    compiled.megatrain.prepare(**batch[0])  # the call that is compared with eager in the end has to fit, too
    step.prepare(batch)
    program = compiled.megatrain.program
    blocks, templates = counted(len(program.blocks), "block"), counted(len(program.templates), "template")
    print(f"plan    {blocks} over {templates}\n", flush=True)
    _train(compiled, step, optimizer, loss, folder, begun)

    reached, right = score(compiled, target)
    shown = " -> ".join(f"{losses[i * (len(losses) - 1) // 4]:.3f}" for i in range(5))
    print(f"\nloss     {shown}; on new numbers {reached:.3f}, where a guess has {math.log(10):.3f}")
    print(f"sorted   {right} of {SCORED} new numbers right", flush=True)
    peak, whole = compiled.megatrain.peak_bytes, format_bytes(4 * weights)
    print(f"memory   peak of the device {format_bytes(peak)}, scheduled {format_bytes(step.schedule.peak_bytes)};")
    print(f"         the weights alone take {format_bytes(weights)}, AdamW with gradients {whole}", flush=True)
    compiled.train()
    same = {"device": compiled.megatrain.options.device, "memory": budget, "transfer": "copy"}
    report = megatrain.verify(model, compile_options=same, **batch[0])
    print(f"\n{report}")
    page = f"{folder}-report.html"
    megatrain.report(step, page, measured=step.time(batch))
    print(f"\nwritten  `{page}`: the step in pictures, planned and measured; `print(step.schedule)` is its table")
    return reached < losses[0] and peak <= budget and report.ok


def _train(
    compiled: megatrain.CompiledModule,
    step: megatrain.TrainStep,
    optimizer: torch.optim.Optimizer,
    loss: _Interrupting | None,
    folder: Path,
    begun: dict[str, Any],
) -> None:
    """Takes all steps that are left, and saves now and then, at the end, and where Ctrl-C comes; notes the losses."""
    steps, losses = begun["steps"], begun["losses"]
    first, began = step.progress.count, time.perf_counter()
    shown = began
    user = {"demo": begun}
    device = compiled.megatrain.options.device.torch_device
    saved = first

    def save() -> None:
        nonlocal saved
        if step.progress.count > saved:
            # With the configuration, so that `from_pretrained` reads the folder.
            step.save(folder, user=user, more=compiled.config.save_pretrained)
            saved = step.progress.count

    try:
        while (number := step.progress.count) < steps:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(number, steps)
            if loss is not None:
                loss.before_step(number)
            losses.append(float(step(_batches(number, device))))
            now = time.perf_counter()
            if now - shown >= PRINT_EVERY_S or number + 1 in (first + 1, steps):
                shown = now
                per_s = (number + 1 - first) / (now - began)
                print(f"step    {number + 1} of {steps}  loss {losses[-1]:.3f}  {per_s:.1f} steps/s", flush=True)
            if step.progress.count % SAVE_EVERY == 0:
                save()
        save()
    except KeyboardInterrupt as interrupt:
        save()  # the step in which it came has left no trace
        if not saved:
            raise
        where = "" if folder == FOLDER else f" --folder {shlex.quote(str(folder))}"
        raise KeyboardInterrupt(
            f"step {saved} of {steps} is saved in `{folder}`, and nothing is still running.\n"
            f"  Continue with: megatrain demo --resume{where}"
        ) from interrupt
    print(f"\n{counted(step.progress.count - first, 'step')} in {time.perf_counter() - began:.0f} s; `{folder}` has it")


class _Interrupting:
    """The model's own loss; in one step it presses Ctrl-C, when the forward is over."""

    def __init__(self, at: int) -> None:
        self._at, self._is_due = at, False
        # A shell starts jobs in the background so that they ignore Ctrl-C; this one presses it and has to hear it.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def before_step(self, number: int) -> None:
        """Notes which step comes."""
        self._is_due = number == self._at

    def __call__(self, result: Any, batch: Any) -> torch.Tensor:
        if self._is_due:
            self._is_due = False
            signal.raise_signal(signal.SIGINT)
        return result.loss


def _recorded(folder: Path) -> dict[str, Any]:
    """What the demo has noted in its checkpoint.

    Raises:
        CheckpointError: If it is somebody else's folder.
    """
    if not present(folder.resolve()).exists():
        raise CheckpointError(f"there is no checkpoint in `{folder}`.\n  Begin without --resume, or name its folder.")
    user: Any = saving.load(folder).extra.get("user")
    found = user.get("demo") if isinstance(user, dict) else None
    if not isinstance(found, dict) or "losses" not in found:
        raise CheckpointError(
            f"`{folder}` is a checkpoint, but not of this demo.\n"
            "  The demo resumes and replaces only its own checkpoints.\n"
            "  Name another folder with --folder, or remove this one."
        )
    return found


# -- task and model --------------------------------------------------------------------------------------------------


def numbers(count: int, draw: torch.Generator) -> torch.Tensor:
    """Returns rows such as `7 3 9 1 4 2 > 1 2 3 4 7 9`: digits, a mark, and the same digits sorted."""
    digits = torch.randint(10, (count, DIGITS), generator=draw)
    return torch.cat([digits, torch.full((count, 1), SORTED), digits.sort(dim=1).values], dim=1)


def _example(rows: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """Rows as an input; the loss is that of the sorted digits."""
    labels = rows.clone()
    labels[:, : DIGITS + 1] = -100
    return {"input_ids": rows.to(device), "labels": labels.to(device)}


def _batches(step: int, device: torch.device) -> list[dict[str, Any]]:
    """The micro-batches of a step, fixed by its number."""
    draw = torch.Generator().manual_seed(step)
    return [_example(numbers(SAMPLES, draw), device) for _ in range(MICRO_BATCHES)]


SCORED = 10 * SAMPLES
_NEW = 2**32 - 1  # no step has this number; torch takes the low 32 bits of a seed


@torch.no_grad()
def score(model: nn.Module, device: torch.device) -> tuple[float, int]:
    """Returns the loss on numbers that no step has seen, and how many of them are sorted right."""
    model.eval()
    draw, total, right = torch.Generator().manual_seed(_NEW), 0.0, 0
    for _ in range(SCORED // SAMPLES):
        rows = numbers(SAMPLES, draw)
        result = model(**_example(rows, device))
        said = result.logits.argmax(dim=-1).cpu()[:, DIGITS:-1]
        total += float(result.loss)
        right += int((said == rows[:, DIGITS + 1 :]).all(dim=1).sum())
    return total / (SCORED // SAMPLES), right


def build_model() -> nn.Module:
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
    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": WIDTH * 11 // 4, "num_hidden_layers": DEPTH}
    heads = {"num_attention_heads": WIDTH // 32, "num_key_value_heads": WIDTH // 32}
    more: dict[str, Any] = {"max_position_embeddings": 32, "use_cache": False, "attn_implementation": "sdpa"}
    return LlamaForCausalLM(LlamaConfig(vocab_size=SORTED + 2, **shape, **heads, **more))


def learning_rate(step: int, steps: int) -> float:
    """Returns the rate of a step, counted from 0: a linear warm-up to the peak, then a cosine down to a tenth of it."""
    warmup = max(1, steps // 8)
    done = max(0, step + 1 - warmup) / max(1, steps - warmup)
    return 1e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * done))) * min(1.0, (step + 1) / warmup)
