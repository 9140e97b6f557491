"""`megatrain demo`: a small language model is trained within less memory than its weights, and compared with eager.

An example to read: text, model, a `TrainStep`, its checkpoints and the comparison. Halfway it may interrupt itself, as
Ctrl-C would; another process goes on from the checkpoint, with the bits of an undisturbed run.
"""

from __future__ import annotations

import hashlib
import math
import shlex
import signal
import time
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn

import megatrain
from megatrain import saving
from megatrain.counts import counted
from megatrain.errors import CheckpointError, OptionError
from megatrain.files.replace import present
from megatrain.sizes import format_bytes, parse_bytes

FOLDER = Path("megatrain-demo")
MEMORY, STEPS = "12MiB", 200
CONTEXT, WIDTH, DEPTH, NUM_BYTES = 128, 256, 6, 256
MICRO_BATCHES, SAVE_EVERY, SAMPLE_BYTES = 2, 60, 120


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

    Args:
        folder: Of the checkpoint.
        resume: Goes on from it.
        interrupt_at: After which part of the steps this process interrupts itself; None doesn't.
        device: Compute device; None takes the accelerator if it has what a run needs, else the CPU.
        memory: Device-memory budget; less than the model's weights by default.
        steps: Of the training; a resumed one has its own.

    Returns:
        0 if the model learnt, the device stayed within the budget, and the gradients are eager PyTorch's; else 1.

    Raises:
        CheckpointError: If the folder has no checkpoint to resume, or something else than one to replace.
        OptionError: If another number of steps is given than the checkpoint's, or transformers isn't installed.
        KeyboardInterrupt: Saying what is saved, if something is.
    """
    print("megatrain demo: a small Llama learns Python's help pages within less memory than its weights", flush=True)
    folder, training = Path(folder), read_corpus()[0]
    found = _recorded(folder, training, is_needed=resume) if resume or present(folder.resolve()).exists() else None
    if resume and found is not None and steps not in (None, found["steps"]):
        raise OptionError(
            f"--steps {steps} is given, but the training in `{folder}` has {found['steps']}.\n"
            "  The learning rate of a step depends on how many there are.\n  Leave --steps out, or begin anew."
        )
    number_of_steps = int(found["steps"]) if resume and found is not None else steps or STEPS
    return int(not _demonstrate(folder, resume, interrupt_at, device, parse_bytes(memory or MEMORY), number_of_steps))


def _demonstrate(
    folder: Path, resume: bool, interrupt_at: float | None, device: str | None, budget: int, steps: int
) -> bool:
    training, held_out = read_corpus()
    model = build_model()
    compiled = megatrain.compile(model, device=device, memory=budget, transfer="copy")
    target = compiled.megatrain.options.device.torch_device
    weights = sum(p.nbytes for p in model.parameters())
    print(f"model   {type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")
    print(f"memory  {format_bytes(budget)} of {target}; the weights take {format_bytes(weights)}", flush=True)

    optimizer = torch.optim.AdamW(compiled.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    loss = None if interrupt_at is None else _Interrupting(max(1, int(interrupt_at * steps)))
    options: dict[str, Any] = {"max_grad_norm": 1.0, "loss": loss}
    if resume:
        step = megatrain.TrainStep.load(folder, compiled, optimizer, **options)
        print(f"resume  from `{folder}`: step {step.progress.count} of {steps}")
    else:
        step = megatrain.TrainStep(compiled, optimizer, **options)
    compiled.train()
    batch = _batches(training, step.progress.count, target)
    compiled.megatrain.prepare(**batch[0])  # the call that is compared with eager in the end has to fit, too
    step.prepare(batch)
    program = compiled.megatrain.program
    print(f"plan    {counted(len(program.blocks), 'block')} over {counted(len(program.templates), 'template')}\n")
    user = {"demo": {"steps": steps, "text": _digest(training)}}
    _train(compiled, step, optimizer, loss, training, folder, user)

    reached, baseline = held_out_loss(compiled, held_out, target), unigram_entropy(training, held_out)
    print(
        f"\nheld-out loss {reached:.3f} nats a byte; of byte frequencies {baseline:.3f}, of nothing {math.log(256):.3f}"
    )
    print(f"it writes: {write_sample(compiled, b'The ', target)!r}")
    print(f"\n{step.schedule}")
    peak = compiled.megatrain.peak_bytes
    print(f"\npeak measured {format_bytes(peak)}, scheduled {format_bytes(step.schedule.peak_bytes)}", flush=True)
    compiled.train()
    same = {"device": compiled.megatrain.options.device, "memory": budget, "transfer": "copy"}
    report = megatrain.verify(model, compile_options=same, **batch[0])
    print(f"\n{report}")
    return reached < baseline and peak <= budget and report.ok


def _train(
    compiled: megatrain.CompiledModule,
    step: megatrain.TrainStep,
    optimizer: torch.optim.Optimizer,
    loss: _Interrupting | None,
    text: bytes,
    folder: Path,
    user: dict[str, Any],
) -> None:
    """Takes all steps that are left, and saves now and then, at the end, and where Ctrl-C comes."""
    steps, first, began = user["demo"]["steps"], step.progress.count, time.perf_counter()
    device = compiled.megatrain.options.device.torch_device
    saved = first

    def save() -> None:
        nonlocal saved
        if step.progress.count > saved:
            # With the configuration, so that `from_pretrained` reads the folder.
            step.save(folder, user=user, more=compiled.config.save_pretrained)
            saved = step.progress.count

    try:
        with step.progress_line(steps, MICRO_BATCHES * CONTEXT) as line:
            while (number := step.progress.count) < steps:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(number, steps)
                if loss is not None:
                    loss.before_step(number)
                line.update(step(_batches(text, number, device)))
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
    """The model's own loss; in one step it presses Ctrl-C, when the forward is over.

    Args:
        at: The number of this step.
    """

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


def _recorded(folder: Path, text: bytes, *, is_needed: bool) -> dict[str, Any]:
    """What the demo has noted in its checkpoint.

    Raises:
        CheckpointError: If it is somebody else's folder, or of another text.
    """
    if not present(folder.resolve()).exists():
        raise CheckpointError(f"there is no checkpoint in `{folder}`.\n  Begin without --resume, or name its folder.")
    user: Any = saving.load(folder).extra.get("user")
    found = user.get("demo") if isinstance(user, dict) else None
    if not isinstance(found, dict):
        raise CheckpointError(
            f"`{folder}` is a checkpoint, but not of this demo.\n"
            "  The demo resumes and replaces only its own checkpoints.\n"
            "  Name another folder with --folder, or remove this one."
        )
    if is_needed and found["text"] != _digest(text):
        raise CheckpointError(
            f"the training in `{folder}` used another text.\n"
            "  Python's help pages differ between versions of Python.\n"
            "  Resume with the version of that training, or begin without --resume."
        )
    return found


# -- text and model --------------------------------------------------------------------------------------------------


def read_corpus() -> tuple[bytes, bytes]:
    """Returns the help texts of Python itself: nine tenths to train on, the rest held out.

    Topics quote each other at length, so a paragraph counts only where it stands first.
    """
    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    text = "\n\n".join(dict.fromkeys(p for p in paragraphs if p.strip())).encode()
    end = len(text) * 9 // 10
    return text[:end], text[end:]


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def unigram_entropy(training: bytes, held_out: bytes) -> float:
    """Nats per held-out byte under the byte frequencies of the training text, each count raised by one."""
    counts, total = Counter(training), len(training) + NUM_BYTES
    return -sum(n * math.log((counts[b] + 1) / total) for b, n in Counter(held_out).items()) / len(held_out)


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
    heads = {"num_attention_heads": WIDTH // 64, "num_key_value_heads": WIDTH // 64}
    more: dict[str, Any] = {"max_position_embeddings": CONTEXT, "use_cache": False, "attn_implementation": "sdpa"}
    return LlamaForCausalLM(LlamaConfig(vocab_size=NUM_BYTES, **shape, **heads, **more))


def learning_rate(step: int, steps: int) -> float:
    """Returns the rate of a step, counted from 0: a linear warm-up to the peak, then a cosine down to a tenth of it."""
    warmup = max(1, steps // 8)
    done = max(0, step + 1 - warmup) / max(1, steps - warmup)
    return 2e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * done))) * min(1.0, (step + 1) / warmup)


def _batches(text: bytes, step: int, device: torch.device) -> list[dict[str, Any]]:
    """The micro-batches of a step: windows of the text, fixed by its number."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT + 1, (MICRO_BATCHES,), generator=draw).tolist()
    ids = [torch.tensor([list(text[start : start + CONTEXT])], device=device) for start in starts]
    return [{"input_ids": window, "labels": window} for window in ids]


@torch.no_grad()
def held_out_loss(model: nn.Module, text: bytes, device: torch.device) -> float:
    """Returns nats per byte over the start of a text, in windows."""
    model.eval()
    windows = torch.tensor(list(text[: 64 * CONTEXT]), device=device).view(-1, MICRO_BATCHES, CONTEXT)
    return sum(float(model(input_ids=ids, labels=ids).loss) for ids in windows) / len(windows)


@torch.no_grad()
def write_sample(model: nn.Module, prompt: bytes, device: torch.device) -> str:
    """Lets the model continue `prompt`, one byte at a time. What pads a window can't be seen: attention is causal."""
    model.eval()
    text, draw = list(prompt), torch.Generator().manual_seed(0)
    for _ in range(SAMPLE_BYTES):
        seen = text[-CONTEXT:]
        window = torch.tensor([seen + [0] * (CONTEXT - len(seen))], device=device)
        logits = model(input_ids=window).logits[0, len(seen) - 1].float().cpu()
        text.append(int(torch.multinomial(torch.softmax(logits / 0.7, 0), 1, generator=draw)))
    return bytes(text).decode(errors="replace")
