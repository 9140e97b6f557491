"""Three runs of a step whose tensors are seen: the graph uncut, its blocks in order, and the compiled step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from megatrain.device import Device, find, is_on_host
from megatrain.passes.interpret import Code
from megatrain.passes.pipeline import stateless
from megatrain.passes.program import Block, Program
from megatrain.runtime.engine import Engine
from megatrain.runtime.executor import Executor
from megatrain.tools.verification.compare import Tolerance, distance, distinct_tensors, scale_of
from megatrain.tools.verification.report import FirstDifference
from megatrain.tools.verification.trial import generators, on_host
from megatrain.tracer.arguments import tensors_given
from megatrain.tracer.inventory import inventory
from megatrain.tracer.traced import TracedModule
from megatrain.training.compiled.inside import Variant

_Tensors = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Shape, dtype and three sums of a tensor, the third of which depends on the order of its elements.

    The sums are rounded on an accelerator, whose kernels may add in another order each time.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sums: tuple[str, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Fingerprint:
        """Reads a tensor."""
        dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
        digits = 17 if is_on_host(dense) else 4
        real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        with torch.no_grad():
            wide = real.cpu().to(torch.float64).reshape(-1)
            order = torch.arange(wide.numel(), dtype=torch.float64).mul_(0.7).cos_()
            wild = float((~wide.isfinite()).sum())
            wide = wide.nan_to_num(1.0, 2.0, -2.0)
            sums = (wild, float(wide.sum()), float(wide.square().sum()), float(wide @ order))
        return Fingerprint(tuple(tensor.shape), tensor.dtype, tuple(f"{s:.{digits}g}" for s in sums))


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module: its name, and the fingerprints of the tensors it returned."""

    name: str
    number: int
    outputs: tuple[Fingerprint, ...]


@contextmanager
def followed_calls(model: nn.Module) -> Generator[list[ModuleCall]]:
    """Collects the module calls of a forward, in the order in which they return."""
    calls: list[ModuleCall] = []
    counts: Counter[str] = Counter()

    def follow(name: str) -> Any:
        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            calls.append(ModuleCall(name, counts[name], tuple(map(Fingerprint.of, distinct_tensors(output)))))
            counts[name] += 1

        return note

    handles = [module.register_forward_hook(follow(name)) for name, module in model.named_modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


class WholeGraph:
    """Stands for a model in a step: the traced graph on the model's own state, under one autograd graph.

    The model is an eager copy on the compute device. Its parameters get the gradients, its buffers the new values.
    """

    def __init__(self, traced: TracedModule, program: Program, model: nn.Module):
        self._traced = traced
        self._tensors = inventory(model)[1]
        # One that block 3 writes into is called `x_in_3` from there on.
        self._kept = {name: name.removesuffix(f"_in_{value.producer}") for name, value in program.values.items()}
        self._versions: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._prints: dict[str, set[Fingerprint]] = defaultdict(set)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward and returns the model's output."""
        lifted = stateless(self._traced)
        commits = {key for key, _ in self._traced.writes_back}
        state = [self._state(key).clone() if key in commits else self._state(key) for key in lifted.keys]
        arguments = [*tensors_given(args, kwargs), *state]
        names = {placeholder: name for name, placeholder in lifted.placeholders.items()}
        written = {other.name for node in lifted.graph.nodes for other in node.meta.get("writes", ())}
        kept, live = set(self._kept.values()), dict[str, Any]()

        def see(node: fx.Node, value: Any) -> None:
            name = names.get(node, node.name)
            if name in written:
                live[name] = value
            changed = (each.name for each in node.meta.get("writes", ()) if each.name in live)
            seen = {name: value, **{each: live[each] for each in changed}}
            for each, held in seen.items():
                self._prints[each].update(map(Fingerprint.of, distinct_tensors(held)))
                if each in kept and isinstance(held, torch.Tensor):
                    self._versions[each].append(on_host(held))

        for node, tensor in zip(lifted.graph.nodes, arguments, strict=False):
            see(node, tensor)
        found = Code(lifted.graph, see=see)(arguments)
        commits_at = len(found) - len(self._traced.writes_back)
        with torch.no_grad():
            for (key, _), tensor in zip(self._traced.writes_back, found[commits_at:], strict=True):
                self._tensors[key].copy_(tensor)
        # What the forward leaves in attributes, and inputs that it writes, come after what it returns.
        return self._traced.outputs.fill(found[: len(self._traced.outputs.placeholders)])

    def _state(self, key: str) -> torch.Tensor:
        # A constant may be written too; the next run must find it as it was.
        return self._tensors[key] if key in self._tensors else self._traced.constants[key].clone()

    def values(self, name: str) -> list[torch.Tensor]:
        """Returns what a value of the program held, once made and after each write; nothing if a pass has made it."""
        return self._versions[self._kept[name]]

    def first_wrong_call(self, calls: Iterable[ModuleCall]) -> ModuleCall | None:
        """Returns the first call of a module whose outputs the graph doesn't have where the module hands them on."""
        return next((call for call in calls if not self._handed_on(call).issuperset(call.outputs)), None)

    def _handed_on(self, call: ModuleCall) -> set[Fingerprint]:
        """What a module call may return: what others read of it, what nobody reads, and what isn't its own."""
        nodes = list(self._traced.graph.nodes)
        inside = {n for n in nodes if (call.name, call.number) in (n.meta.get("modules") or ())}
        hidden = {n for n in inside if n.users and inside.issuperset(n.users)}
        return set().union(*(self._prints[n.name] for n in nodes if n not in hidden))


# -- the blocks in order -----------------------------------------------------------------------------------------


class Boundaries:
    """What passes the boundaries of blocks in one step.

    Attributes:
        values: By name, on the host, as the forward makes them.
    """

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self._state: dict[str, torch.Tensor] = {}
        self._others: dict[tuple[str, int, str, str], torch.Tensor | None] = {}

    def see(self, phase: str, block: Block, what: str, names: Sequence[str], tensors: _Tensors) -> None:
        """Keeps the tensors that pass at one place, such as `("forward", block, "output")`."""
        for name, tensor in zip(names, tensors, strict=True):
            if what == "state" and tensor is not None:
                self._state[name] = tensor.detach()
            elif what in ("input", "output") and tensor is not None:
                self.values.setdefault(name, on_host(tensor))
            else:
                self._others[phase, block.index, what, name] = None if tensor is None else on_host(tensor)

    def at(self, phase: str, block: int, what: str, name: str) -> torch.Tensor | None:
        """Looks up what should be there."""
        if what in ("input", "output"):
            return self.values[name]
        return self._state[name] if what == "state" else self._others.get((phase, block, what, name))


@dataclass(slots=True, eq=False)
class _Ran:
    """A block after its forward: leaves, their aliases for what later blocks leave, and outputs with history."""

    block: Block
    inputs: list[torch.Tensor]
    state: list[torch.Tensor]
    carries: list[torch.Tensor]
    outputs: tuple[torch.Tensor, ...]


class BlocksInOrder:
    """Stands for a model in a step: forward block by block, and `backward` in reverse once the loss has been.

    Nothing of the runtime takes part, but every partial sum of gradients is formed in its order, so that the two are
    the same bits. The model's parameters get the gradients, its buffers the new values.
    """

    def __init__(self, variant: Variant, model: nn.Module):
        self._program = variant.program
        self._outputs = variant.traced.outputs
        self._tensors = inventory(model)[1]
        self._codes = {name: Code(t.graph) for name, t in variant.program.templates.items()}
        self.boundaries = Boundaries()
        self._ran: list[_Ran] = []
        self._values: dict[str, torch.Tensor] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._returned: list[torch.Tensor] = []
        self._given: tuple[torch.Tensor, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward and returns the model's output, its differentiable tensors being leaves."""
        program = self._program
        self._given = tensors_given(args, kwargs)
        for name, tensor in zip(program.inputs, self._given, strict=True):
            self._values[name] = tensor.detach().requires_grad_(tensor.requires_grad)
        self._values |= {name: self._tensors[key].detach().clone() for name, key in program.buffers}
        self._values |= program.constants
        for block in program.blocks:
            self._forward(block)
        with torch.no_grad():
            for key, name in program.commits:
                self._tensors[key].copy_(self._values[name])
        self._returned = [self._output(ref.kind, ref.name) for ref in program.outputs]
        return self._outputs.fill(self._returned[: len(self._outputs.placeholders)])

    def _output(self, kind: str, name: str) -> torch.Tensor:
        return self._tensors[name] if kind == "state" else _leaf(self._values[name], self._values[name].requires_grad)

    def _forward(self, block: Block) -> None:
        program = self._program
        inputs = [_leaf(self._values[n], program.values[n].requires_grad) for n in block.inputs]
        entries = [program.state[key] for key in block.binding]
        state = [_leaf(entry.of(self._tensors), entry.requires_grad) for entry in entries]
        see, random_state = self.boundaries.see, generators(find(program.device))
        see("forward", block, "input", block.inputs, inputs)
        see("forward", block, "state", block.binding, state)
        see("forward", block, "random state", list(random_state), list(random_state.values()))
        outputs = self._codes[block.template]([*inputs, *state])
        see("forward", block, "output", block.outputs, outputs)
        carries = [torch.ops.aten.alias.default(t) for t in inputs]
        self._ran.append(_Ran(block, inputs, state, carries, outputs))
        for name, tensor in zip(block.outputs, outputs, strict=True):
            self._values[name] = tensor.detach().requires_grad_(tensor.requires_grad)

    def backward(self) -> None:
        """Takes the gradients that the loss left at the outputs through the blocks, last block first."""
        for ref, tensor in zip(self._program.outputs, self._returned, strict=True):
            if ref.kind == "value" and tensor.grad is not None:
                known = self._gradients.get(ref.name)
                self._gradients[ref.name] = tensor.grad if known is None else known + tensor.grad
        sums: dict[str, torch.Tensor] = {}
        while self._ran:
            self._backward(self._ran.pop(), sums)
        whole: dict[str, torch.Tensor] = {}
        for key, total in sums.items():
            entry = self._program.state[key]
            if entry.base is None:
                whole[key] = total
                continue
            if entry.base not in whole:  # rows of parts without a gradient are zero
                whole[entry.base] = torch.zeros_like(self._tensors[entry.base], requires_grad=False)
            whole[entry.base][slice(*entry.rows)] = total
        for key, total in whole.items():
            # By way of autograd, which runs the hooks on parameters.
            torch.autograd.backward([self._tensors[key]], [total])
        for name, tensor in zip(self._program.inputs, self._given, strict=True):
            if tensor.requires_grad:
                tensor.grad = self._gradients.get(name)

    def _backward(self, ran: _Ran, sums: dict[str, torch.Tensor]) -> None:
        block = ran.block
        roots = [self._gradients.get(n) for n in block.outputs]
        see = self.boundaries.see
        see("backward", block, "gradient of", block.outputs, roots)
        carried = [self._gradients.get(n) for n in block.inputs]
        pairs = [
            (root, gradient)
            for root, gradient in zip([*ran.outputs, *ran.carries], [*roots, *carried], strict=True)
            if gradient is not None and root.requires_grad
        ]
        leaves = [t for t in (*ran.inputs, *ran.state) if t.requires_grad]
        if not leaves or all(g is None for g in roots):
            return
        found = iter(torch.autograd.grad([r for r, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True))
        own = [next(found) if t.requires_grad else None for t in ran.inputs]
        state = [next(found) if t.requires_grad else None for t in ran.state]
        see("backward", block, "gradient of input", block.inputs, own)
        see("backward", block, "gradient of state", block.binding, state)
        self._gradients |= {n: g for n, g in zip(block.inputs, own, strict=True) if g is not None}
        for key, gradient in zip(block.binding, state, strict=True):
            if gradient is not None:
                sums[key] = sums[key] + gradient if key in sums else gradient


def _leaf(tensor: torch.Tensor, needs_grad: bool) -> torch.Tensor:
    return tensor.detach().requires_grad_(torch.is_grad_enabled() and needs_grad)


# -- the compiled step -------------------------------------------------------------------------------------------


class BoundaryWatch:
    """Compares passing tensors with those that should pass, and keeps the first difference."""

    def __init__(self, truth: Boundaries, step: int, tolerance: Tolerance):
        self.first: FirstDifference | None = None
        self._truth, self._step, self._tolerance = truth, step, tolerance

    def see(self, phase: str, block: Block, what: str, names: Sequence[str], tensors: _Tensors) -> None:
        """Compares the tensors that pass at one place."""
        for name, tensor in zip(names, tensors, strict=True):
            if self.first is not None:
                return
            # A recompute repeats the forward: it reads and makes the same.
            expected = self._truth.at("forward" if phase == "recompute" else phase, block.index, what, name)
            # Only numbers count here: one of the two may have a history.
            absolute, reason = distance(*(None if each is None else each.detach() for each in (expected, tensor)))
            relative = absolute / scale_of(expected) if absolute else 0.0
            if relative > self._tolerance.of_value(expected):
                at, size = (self._step, block.index, block.name, phase), (absolute, relative, reason)
                self.first = FirstDifference("runtime", *at, f"{what} `{name}`", *size)

    def watch(self, variant: Variant, engine: Engine) -> None:
        """Puts a watched runner in front of every block's."""
        lowered = variant.lowered
        if lowered.executor is None:
            lowered.executor = Executor(lowered.program, lowered.schedule, engine)
        runners: list[Any] = lowered.executor.loaded.runners
        runners[:] = [
            _WatchedRunner(runner, block, self, engine.device)
            for runner, block in zip(runners, variant.program.blocks, strict=True)
        ]


class _WatchedRunner:
    """A block's runner that compares everything that goes in and comes out."""

    def __init__(self, runner: Any, block: Block, seen: BoundaryWatch, device: Device):
        self._runner, self._block, self._watch, self._device = runner, block, seen, device
        self._has_run = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, inputs: Any, state: Any, *rest: Any, **options: Any) -> Any:
        phase = self._enter(inputs, state)
        outputs = self._runner.forward(inputs, state, *rest, **options)
        self._watch.see(phase, self._block, "output", self._block.outputs, outputs)
        return outputs

    def forward_with_graph(self, inputs: Any, state: Any, *rest: Any, **options: Any) -> Any:
        phase = self._enter(inputs, state)
        graph, outputs = self._runner.forward_with_graph(inputs, state, *rest, **options)
        if phase == "forward" or self._runner.repeats_outputs:
            self._watch.see(phase, self._block, "output", self._block.outputs, outputs)
        return _WatchedGraph(graph, self._block, self._watch), outputs

    def _enter(self, inputs: Any, state: Any) -> str:
        phase = "recompute" if self._has_run else "forward"
        self._has_run = True
        self._watch.see(phase, self._block, "input", self._block.inputs, inputs)
        self._watch.see(phase, self._block, "state", self._block.binding, state)
        if phase == "forward" or self._runner.rng_state() is not None:
            states = generators(self._device)
            self._watch.see(phase, self._block, "random state", list(states), list(states.values()))
        return phase


class _WatchedGraph:
    """A block's local graph, with the gradients that come in and go out compared."""

    def __init__(self, graph: Any, block: Block, seen: BoundaryWatch):
        self._graph, self._block, self._watch = graph, block, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)

    def gradients(self, output_gradients: Any, *rest: Any, **options: Any) -> Any:
        block = self._block
        self._watch.see("backward", block, "gradient of", block.outputs, output_gradients)
        own, state = self._graph.gradients(output_gradients, *rest, **options)
        self._watch.see("backward", block, "gradient of input", block.inputs, own)
        self._watch.see("backward", block, "gradient of state", block.binding, state)
        return own, state
