"""Situations of training: a model, an optimizer, how it runs, and what user code does in six steps, as plain values.

`python -m tests.training.situations "Training(...)"` repeats one.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import megatrain
from tests.comparing import difference, snapshot
from tests.optim.reference import Reference, values_of
from tests.strategies import WIDTH
from tests.training.parity import generator_of
from tests.training.user_code import LAYERS, LOSSES, TABLE, VARIABLE, Part, Shared, Side
from tests.training.user_edits import EDITS, OPTIMIZERS

NUM_STEPS = 6
ROUNDS_OTHERWISE = ("fused", "adam", "nadam", "radam", "asgd", "adafactor")
"""On a device torch takes their fused or foreach code; on the host, where masters are, it doesn't (docs/limits.md)."""
FILED, FOLDER = ("fused", "8 bit"), str(Path(__file__).parent)
"""Optimizers whose state can be in a file between updates, and a folder on a disk."""
CALLS = ("evaluate", "averaged")
"""They call the model: before it is compiled it is on the host, where only eager's reference isn't."""
SPEAKS = ("module hook", "logs", "activation hook")
"""Two such layers say things under one name, in an order that several micro-batches change."""
Edit = tuple[int, str, str, int]
"""The step, where in it ("start", "steps", "forward"), a name of `EDITS`, and a number that says of what."""


@dataclass(frozen=True)
class Training:
    """One run. `repr` shows what differs from the plainest.

    Args:
        layers: Names of `LAYERS`.
        is_tied: Uses the first layer a second time at the end.
        loss: A name of `LOSSES`.
        optimizer: A name of `OPTIMIZERS`.
        number: Says which, of losses and optimizers.
        num_groups: Of the optimizer.
        sizes: Rows of each micro-batch.
        factors: The number that the model is called with, in each step.
        is_loop: A loop of one's own calls the compiled model; else a `TrainStep`.
        step: Options of `TrainStep`.
        compile: Options of `compile`.
        edits: What user code does, in order.
        looks: Whether all is compared after each step, which runs the updates that are due; else at the end.
        seed: Of weights and batches.
    """

    layers: tuple[str, ...] = ("linear", "linear")
    is_tied: bool = False
    loss: str = "square"
    optimizer: str = "plain sgd"
    number: int = 0
    num_groups: int = 1
    sizes: tuple[int, ...] = (3,)
    factors: tuple[float, ...] = ()
    is_loop: bool = False
    max_norm: float | None = None
    step: dict[str, Any] = field(default_factory=dict)
    compile: dict[str, Any] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    looks: bool = True
    seed: int = 0

    def __repr__(self) -> str:
        plain = Training()
        given = [f.name for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)]
        return f"Training({', '.join(f'{name}={getattr(self, name)!r}' for name in given)})"

    @property
    def parts(self) -> list[Part]:
        return [
            *(LAYERS[name] for name in self.layers),
            LOSSES[self.loss],
            OPTIMIZERS[self.optimizer],
            *(EDITS[name] for _, _, name, _ in self.edits),
        ]

    @property
    def is_narrow(self) -> bool:
        return self.compile.get("precision") == "bf16"

    @property
    def device(self) -> str:
        return self.compile.get("device", "cpu")


class Net(nn.Module):
    """Layers, one after the other, and a number."""

    def __init__(self, it: Training, shared: Shared):
        super().__init__()
        torch.manual_seed(it.seed)
        first = nn.Linear(WIDTH, WIDTH)
        made = [LAYERS[name].do(shared, number) for number, name in enumerate(it.layers)]
        self.layers = nn.ModuleList([first, *made, *([first] if it.is_tied else [])])

    def forward(self, x: torch.Tensor, factor: float | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if factor is None else x * factor


@dataclass
class Run:
    """What one side did: a record of each step, and why it ended before the last, if it did."""

    records: list[dict[str, Any]] = field(default_factory=list)
    refusal: BaseException | None = None
    warned: list[warnings.WarningMessage] = field(default_factory=list)


class Sides:
    """One of the two: eager PyTorch, or megatrain."""

    def __init__(self, it: Training, compiles: bool):
        self.it, self.compiles = it, compiles
        self.shared = Shared()
        self.shared.held["device"] = it.device
        self.reference: Reference | None = None
        self.step: megatrain.TrainStep | None = None
        self.compiled: megatrain.CompiledModule | None = None
        torch.manual_seed(it.seed)
        random.seed(it.seed)
        os.environ.pop(VARIABLE, None)
        model = Net(it, self.shared)
        make = OPTIMIZERS[it.optimizer].do
        if it.is_narrow and not compiles:
            self.reference = Reference(model, lambda ps: make(list(ps), it.number), it.device)
            model, optimizer = self.reference.model, self.reference.optimizer
        else:
            model = model if compiles else model.to(it.device)
            parameters = [p for p in model.parameters() if not it.is_narrow or p.requires_grad]
            cut = len(parameters) // 2 if it.num_groups == 2 else 0
            groups = [{"params": part} for part in (parameters[:cut], parameters[cut:]) if part]
            optimizer = make(groups, it.number)
        self.side = Side(model, optimizer, self.shared, model)
        self.edit(0, "start")
        if compiles:
            options: dict[str, Any] = {"device": "cpu", "transfer": "copy"} | it.compile
            self.compiled = self.side.call = megatrain.compile(model, **options)
        self.loss = LOSSES[it.loss].do(self.side, it.number)
        if self.compiled is not None and not it.is_loop:
            self.step = megatrain.TrainStep(
                self.compiled, optimizer, loss=self.loss, max_grad_norm=it.max_norm, **it.step
            )
            self.side.flush = self.step.flush

    def edit(self, number: int, where: str) -> None:
        for at, place, name, which in self.it.edits:
            if (at, place) == (number, where) and (where != "forward" or self.it.is_loop):
                EDITS[name].do(self.side, which)

    def take(self, number: int) -> dict[str, Any]:
        it = self.it
        generator = generator_of(100 * it.seed + number)
        xs = [torch.randn(size, WIDTH, generator=generator) for size in it.sizes]
        if it.is_narrow and self.reference is not None:
            xs = [x.bfloat16() for x in xs]
        xs = [x.to(it.device) for x in xs]
        batches = [(x, it.factors[number]) if it.factors else (x,) for x in xs]
        torch.manual_seed(number)
        random.seed(number)
        if self.step is not None:
            loss = self.step(batches if len(batches) > 1 else batches[0])
            norm = self.step.progress.grad_norm if it.max_norm is not None else None
        else:
            loss, norm = self.loop(number, batches)
        record = {"loss": loss.detach().reshape(()).cpu(), "norm": None if norm is None else norm.detach().cpu()}
        record |= {"torch": torch.get_rng_state(), "python": random.getstate(), "seen": self.seen()}
        if it.looks or number == NUM_STEPS - 1:
            record |= self.state()
        return moved(record)

    def loop(self, number: int, batches: list[Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        it, side, losses = self.it, self.side, []
        side.model.zero_grad()
        side.optimizer.zero_grad()
        for batch in batches:
            side.shared.held["input"] = batch[0]
            result = side.call(*batch)
            loss = self.loss(result, batch)
            self.edit(number, "forward")
            loss = loss if len(batches) == 1 else loss * (1 / len(batches))
            loss.backward()
            losses.append(loss.detach().reshape(()))
        norm = None if it.max_norm is None else nn.utils.clip_grad_norm_(side.model.parameters(), it.max_norm)
        if self.reference is not None:
            self.reference.update()
        else:
            side.optimizer.step()
        side.model.zero_grad()
        return losses[0] if len(losses) == 1 else sum(losses[1:], losses[0]), norm

    def seen(self) -> Any:
        """What user code saw. Micro-batches of a `TrainStep` pass block by block: only each place has an order."""
        if self.it.is_loop or len(self.it.sizes) == 1:
            return list(self.shared.log)
        return {name: [entry for entry in self.shared.log if entry[0] == name] for name, *_ in self.shared.log}

    def state(self) -> dict[str, Any]:
        """All that training and user code have changed."""
        side = self.side
        side.flush()
        if self.it.is_narrow:
            masters = values_of(self.compiled) if self.compiled is not None else self.reference.masters
            found: dict[str, Any] = {
                "masters": {name: m.detach().clone() for name, m in masters.items()},
                "state": {name: v.detach().clone() for name, v in side.model.state_dict().items()},
            }
        else:
            found = snapshot(side.model, side.optimizer)
            del found["generator"]
        named = dict(side.model.named_modules()) | {"loss": self.shared.held.get("loss")}
        plain = {
            (name, key): value
            for name, module in named.items()
            if module is not None
            for key, value in vars(module).items()
            if isinstance(value, int | float) or (torch.is_tensor(value) and key == "last")
        }
        held = {name: value for name, value in self.shared.held.items() if name not in ("device", "loss", "input")}
        if isinstance(loss := named["loss"], nn.Module):
            held["loss"] = dict(loss.named_buffers())
        return found | {"attributes": plain, "held": held, "factor": self.shared.factor}


def moved(value: Any) -> Any:
    """Copies of tensors on the host, without layout; of a tensor without values its class."""
    if isinstance(value, FakeTensor):
        return "a tensor without values"
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: moved(part) for key, part in value.items()}
    return type(value)(map(moved, value)) if type(value) in (list, tuple) else value


@contextmanager
def _undisturbed() -> Generator[None]:
    before = torch.get_rng_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        os.environ.pop(VARIABLE, None)
        del TABLE[1:]


def run(it: Training, compiles: bool) -> Run:
    found = Run()
    with _undisturbed(), warnings.catch_warnings(record=True) as found.warned:
        warnings.simplefilter("always")
        try:
            side = Sides(it, compiles)
            for number in range(NUM_STEPS):
                side.edit(number, "steps")
                found.records.append(side.take(number))
        except Exception as error:
            found.refusal = error
    return found


def judged(it: Training) -> tuple[str, str]:
    """Whether megatrain is "equal" to eager PyTorch, has "named" why not, or is "silent"; and what differs.

    **Silent** is a run of megatrain that isn't eager's, in a loss, a norm, a parameter, a buffer, the optimizer's
    state, an attribute of a module, memory that user code holds, a generator, or in what user code saw, in order,
    and that

    - no error ended, before or in the first step that differs: a `MegatrainError`, or one of torch's own that eager
      raises as well; and
    - no warning of megatrain named before.

    The error or the warning must name the situation: it has one of the `words` of a part that was drawn. An error that
    names nothing (an AssertionError from inside, say) counts as silent, for nobody could act upon it. What eager itself
    refuses has no numbers to compare.
    """
    expected = run(it, compiles=False)
    if expected.refusal is not None:
        return "refused by eager", str(expected.refusal)
    found = run(it, compiles=True)
    for number, record in enumerate(found.records):
        text = difference(expected.records[number], record, f"step {number}")
        if text is not None:
            said = [str(w.message) for w in found.warned if "numbers" in str(w.message) and names(it, str(w.message))]
            return ("named", said[0]) if said else ("silent", text)
    error = found.refusal
    if error is None:
        return "equal", ""
    text = f"step {len(found.records)}: {type(error).__name__}: {error}"
    is_named = isinstance(error, megatrain.MegatrainError) and names(it, str(error)) and "AssertionError" not in text
    return ("named", text) if is_named else ("silent", f"an error that names nothing in {text}")


def names(it: Training, text: str) -> bool:
    """Whether a text has one of the words of the parts, or says what several micro-batches can't do."""
    words = [word for part in it.parts for word in part.words]
    words += ["differs from micro-batch", "from one micro-batch to the next"] if len(it.sizes) > 1 else []
    return any(word in text for word in words)


# -- the grammar -----------------------------------------------------------------------------------------------------


@st.composite
def trainings(draw: st.DrawFn, device: str = "cpu") -> Training:
    """What is documented to differ isn't drawn: `Part.one_batch`, and sums in another order (docs/limits.md)."""
    is_narrow = draw(st.sampled_from([False, False, False, True]))
    is_loop = not is_narrow and draw(st.booleans())
    kernels = draw(st.sampled_from(["eager", "graphs", "graphs"])) if device != "cpu" else "eager"

    def some(parts: dict[str, Part], place: str | None = None) -> list[str]:
        return [n for n, p in parts.items() if (p.narrow or not is_narrow) and (place is None or place in p.at)]

    optimizers = [n for n in some(OPTIMIZERS) if device == "cpu" or is_narrow or n not in ROUNDS_OTHERWISE]
    layers = draw(st.lists(st.sampled_from(some(LAYERS)), min_size=1, max_size=3))
    places = ["start", "steps", "steps", *(["forward"] if is_loop else [])]
    edits: list[Edit] = []
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.sampled_from(places))
        at = 0 if place == "start" else draw(st.integers(0, NUM_STEPS - 1))
        possible = [n for n in some(EDITS, place) if place != "start" or device == "cpu" or n not in CALLS]
        edits.append((at, place, draw(st.sampled_from(possible)), draw(st.integers(0, 7))))
    if any("hook" in name for _, _, name, _ in edits):
        edits = [edit for edit in edits if edit[2] != "swap tensors"]  # torch then calls no hooks (docs/limits.md)
    is_tied = draw(st.sampled_from([False, False, True]))
    loss = draw(st.sampled_from(["square", *some(LOSSES)]))
    one = (
        is_tied
        or is_narrow
        or any(layers.count(name) > 1 for name in SPEAKS)
        or (is_loop and loss == "of weights")
        or (not is_loop and any(EDITS[name].one_batch for _, _, name, _ in edits))
    )
    options: dict[str, Any] = {"activations": draw(st.sampled_from(["auto", "keep", "recompute", "offload"]))}
    options["block_bytes"] = draw(st.sampled_from([None, 1, 100]))
    if kernels == "graphs":
        options |= {"kernels": "graphs", "activations": draw(st.sampled_from(["auto", "recompute", "offload"]))}
    if device != "cpu":
        options["device"] = device
    elif draw(st.integers(0, 3)) == 0 and not is_narrow:
        options |= {"transfer": "bind", "activations": draw(st.sampled_from(["auto", "keep", "recompute"]))}
    if is_narrow:
        options["precision"] = "bf16"
    updates: list[dict[str, Any]] = [{}, {"spread": True}, {"overlap": False}]
    optimizer, step = draw(st.sampled_from(optimizers)), draw(st.sampled_from(updates))
    if optimizer in FILED and "odd" not in layers:
        # With so much memory the file is there, and steps leave it alone.
        file = {"offload": FOLDER}
        step = step | draw(st.sampled_from([{}, file, {**file, "host_memory": "1TiB"}]))
    return Training(
        layers=tuple(layers),
        is_tied=is_tied and not (is_loop and loss == "of weights"),
        loss=loss,
        optimizer=optimizer,
        number=draw(st.integers(0, 3)),
        num_groups=1 if is_narrow else draw(st.sampled_from([1, 2])),
        sizes=tuple(draw(st.lists(st.integers(2, 4), min_size=1, max_size=1 if one else 3))),
        factors=tuple(draw(st.lists(st.sampled_from([0.5, 1.0, 1.5]), min_size=6, max_size=6)))
        if draw(st.integers(0, 5)) == 0
        else (),
        is_loop=is_loop,
        max_norm=None if is_narrow or "odd" in layers else draw(st.sampled_from([None, None, 0.05, 1.0])),
        step={} if is_loop else step,
        compile={key: value for key, value in options.items() if value not in (None, "auto")},
        edits=tuple(edits),
        looks=draw(st.booleans()),
        seed=draw(st.integers(0, 20)),
    )


def check(it: Training) -> str:
    """Returns how a run ended; a silent one fails, and says how to repeat it."""
    outcome, text = judged(it)
    assert outcome != "silent", f'{text}\npython -m tests.training.situations "{it}"'
    return outcome


if __name__ == "__main__":
    print(*judged(eval(sys.argv[1])))
