"""Program: blocks in execution order, the templates they share with their costs, and the values between them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from megatrain.base.counts import counted
from megatrain.base.sizes import ALIGNMENT
from megatrain.hardware.work import Works, total_flops
from megatrain.passes.interpret import opaque_calls
from megatrain.tracer.calls import call_text
from megatrain.tracer.inventory import StateEntry
from megatrain.tracer.recording.opaque import Opaque
from megatrain.tracer.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Port:
    """A named input or output of a template."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class ResultCost:
    """What a block may keep of its forward so that its backward needn't run fused kernels again, measured.

    Args:
        calls: Places of the calls with these kernels among the nodes of the template's graph, ascending.
        specs: Of the tensors that are kept, in the order in which the kernels return them.
        forward_workspace_bytes: As in `TemplateCost`, of a forward that keeps these; they don't count.
        backward_workspace_bytes: The same of a backward that finds them.
        repeated: The kernels of the repeated forward then.
    """

    calls: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    repeated: Works

    @property
    def figures(self) -> tuple[int, int, Works]:
        """What scheduling needs besides the specs."""
        return self.forward_workspace_bytes, self.backward_workspace_bytes, self.repeated

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(spec.nbytes for spec in self.specs)


@dataclass(frozen=True, slots=True)
class TemplateCost:
    """Bytes and work of one execution of a template, measured on fake tensors.

    Args:
        saved_bytes: Bytes that the forward holds for its backward, beyond inputs, outputs and state.
        forward_workspace_bytes: Most bytes alive inside the forward beyond inputs, outputs and state.
        backward_workspace_bytes: The same for recompute and backward, beyond the gradients produced.
        forward: What the kernels of the forward compute and move.
        backward: The same of the backward alone, without a recompute, where all gradients are needed that some block
            needs.
        unmeasured: Why the bytes are a bound instead (the results of all calls at once) and the kernels aren't
            known; empty where both are measured.
        held_state: Positions of the state that a retained graph keeps by another way than autograd's saved tensors (in
            the context of an autograd.Function). It keeps a copy, counted in `saved_bytes`: slots are written again.
        backwards: Backwards of blocks that need fewer gradients: for which inputs and state, and their kernels.
        saved_parts: The bytes of each tensor in `saved_bytes`, largest first; empty where they aren't measured.
        workspace_parts: The bytes of each tensor that is alive when the workspace of a forward is largest, and of a
            backward with its recompute; largest first; empty where they aren't measured.
        results: What may be kept of a forward that is repeated; None if nothing is worth it anywhere.

    >>> from megatrain.hardware.work import Kernels
    >>> forward, backward = (Kernels("fp32", 4194304, 65536),), (Kernels("fp32", 8388608, 131072, 2),)
    >>> print(TemplateCost(90112, 24576, 57088, forward, backward))
    saves 90112 B, workspace 57088 B, 4.19 + 8.39 MFLOP
    >>> print(TemplateCost(90112, 24576, 57088, unmeasured="a module runs its own code"))
    saves at most 90112 B, workspace at most 57088 B (a module runs its own code)
    """

    saved_bytes: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    forward: Works = ()
    backward: Works = ()
    unmeasured: str = ""
    held_state: tuple[int, ...] = ()
    backwards: tuple[tuple[tuple[bool, ...], Works], ...] = ()
    saved_parts: tuple[int, ...] = ()
    workspace_parts: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
    results: ResultCost | None = None

    def backward_of(self, needs: Sequence[bool]) -> Works:
        """The kernels of a backward for which of the inputs, and then of the state, need a gradient."""
        return dict(self.backwards).get(tuple(needs), self.backward)

    def __str__(self) -> str:
        flops = total_flops(self.forward), total_flops(self.backward)
        workspace = max(self.forward_workspace_bytes, self.backward_workspace_bytes)
        if self.unmeasured:
            return f"saves at most {self.saved_bytes} B, workspace at most {workspace} B ({self.unmeasured})"
        text = f"saves {self.saved_bytes} B, workspace {workspace} B, {_flops_text(*flops)}"
        if self.results is None:
            return text
        spared = _flops_text(flops[0] - total_flops(self.results.repeated))
        return f"{text}; may keep {self.results.nbytes} B of attention for {spared}"


def _flops_text(*flops: int) -> str:
    """Numbers in the unit of the largest, such as `0.5 + 1 MFLOP`; the first alone if the others are zero."""
    shown = flops if any(flops[1:]) else flops[:1]
    scaled, units = max(map(float, flops)), iter(("", "K", "M", "G", "T", "P"))
    unit, one = next(units), 1
    while scaled >= 999.5 and unit != "P":
        scaled, unit, one = scaled / 1000, next(units), one * 1000
    return f"{' + '.join(f'{each / one:.3g}' for each in shown)} {unit}FLOP"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Template:
    """The code of a block without its state.

    Args:
        name: `t0`, `t1`, ...
        graph: Placeholders (inputs, then state), calls, one output. Before `lift_state` the state is read by
            `get_attr` nodes instead.
        inputs: Values from other blocks or from the model's inputs.
        state: Parameters and buffers, as inputs.
        outputs: Tensors that other blocks or the caller read.
        is_random: Draws from the random generator.
        cost: Filled in by `measure`.
    """

    name: str
    graph: fx.Graph
    inputs: tuple[Port, ...]
    state: tuple[Port, ...]
    outputs: tuple[Port, ...]
    is_random: bool
    cost: TemplateCost | None = None

    @property
    def hides_draws(self) -> bool:
        """Whether it draws random numbers that no second run repeats (dropout within an RNN of cuDNN)."""
        return any(node.meta.get("hides_draws") for node in self.graph.nodes)

    @property
    def reads_by_name(self) -> bool:
        """Whether it reads state by `get_attr` nodes, as it does until `lift_state`."""
        return any(node.op == "get_attr" for node in self.graph.nodes)

    def __repr__(self) -> str:
        ports = {"input": self.inputs, "state tensor": self.state, "output": self.outputs}
        return f"<Template {self.name}: {', '.join(counted(len(found), noun) for noun, found in ports.items())}>"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that crosses a block's boundary, or enters or leaves the model.

    Args:
        name: Unique in the program.
        producer: Index of the block that computes it; None for an input.
        storage: Number of its storage; values with one number alias.
        storage_bytes: Bytes of that storage, on the device, or on the host if `spec.on_host`.
    """

    name: str
    spec: TensorSpec
    producer: int | None
    requires_grad: bool
    storage: int
    storage_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Block:
    """A contiguous piece of the graph, in execution order.

    Args:
        index: Its place.
        name: The modules it covers.
        template: Name of its template.
        inputs: Names of the values it reads, in the order of the template's inputs.
        outputs: Names of the values it defines, in the order of the template's outputs.
        binding: Keys of its state, in the order of the template's state.
    """

    index: int
    name: str
    template: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    binding: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<Block {self.index} {self.name}: {self.template}>"


@dataclass(frozen=True, slots=True)
class OutputRef:
    """Where one tensor of the model's output comes from: `"value"` or `"state"`."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Program:
    """A model as blocks over shared templates; prints itself, one line per block.

    Args:
        name: Class name of the model.
        templates: By name, in order of first use.
        blocks: In execution order.
        values: By name, in order of definition, inputs first.
        inputs: Values that the caller passes, in the order of the flattened arguments.
        buffers: `(value, state key)`: buffers that the forward writes enter as values, with their content
            before the step, so that a recompute sees what the forward saw.
        constants: Tensors that the forward reads and no module registers, by the value they enter as.
        commits: `(state key, value)`: the contents of these buffers after the forward, written back once per step.
        rebinds: Buffers that are another tensor after the forward: nothing is written into their earlier memory.
        outputs: Sources of the tensors that the model returns.
        state: All state the program reads, by key.
        device: The compute device that the capture assumed.
        provenance: Names of the passes that made it, in order; the pipeline writes them down.
        alignment: Tensors of a block's state begin at multiples of so many bytes, in a slot and in the host's image of
            it; the pipeline writes it down.
        block_bytes: Target bytes of a block's state; None if blocks are the model's own repeated modules.
        gradient_order: Keys of trained parameters, in the order in which eager's backward completes their gradients;
            see `GradientOrder.groups`.
    """

    name: str
    templates: Mapping[str, Template]
    blocks: tuple[Block, ...]
    values: Mapping[str, Value]
    inputs: tuple[str, ...]
    buffers: tuple[tuple[str, str], ...]
    constants: Mapping[str, torch.Tensor]
    commits: tuple[tuple[str, str], ...]
    outputs: tuple[OutputRef, ...]
    state: Mapping[str, StateEntry]
    device: torch.device
    provenance: tuple[str, ...] = ()
    alignment: int = ALIGNMENT
    block_bytes: int | None = None
    gradient_order: tuple[tuple[str, ...], ...] = ()
    rebinds: frozenset[str] = frozenset()

    @property
    def is_lifted(self) -> bool:
        """Whether no template reads state by name, so that all state comes in by the blocks' bindings."""
        return not any(template.reads_by_name for template in self.templates.values())

    def state_bytes(self, block: Block) -> int:
        """Bytes of the elements of a block's state."""
        return sum(self.state[key].spec.nbytes for key in block.binding)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights that blocks bring from the host."""
        return sum(map(self.state_bytes, self.blocks))

    @property
    def opaque_calls(self) -> tuple[Opaque, ...]:
        """All modules that run their own code at each step."""
        return tuple(call for block in self.blocks for call in self.opaque(block))

    def opaque(self, block: Block) -> tuple[Opaque, ...]:
        """Modules in a block that run their own code."""
        return opaque_calls(self.templates[block.template].graph)

    def readers(self) -> dict[str, tuple[int, ...]]:
        """Blocks that read each value, ascending."""
        found: dict[str, list[int]] = {name: [] for name in self.values}
        for block in self.blocks:
            for name in dict.fromkeys(block.inputs):
                found[name].append(block.index)
        return {name: tuple(blocks) for name, blocks in found.items()}

    def needs_gradients(self, block: Block) -> tuple[bool, ...]:
        """Tells of each input of a block, and then of each tensor of its state, whether it needs a gradient."""
        inputs = (self.values[name].requires_grad for name in block.inputs)
        return (*inputs, *(self.state[key].requires_grad for key in block.binding))

    def __str__(self) -> str:
        return _program_text(self)

    def __repr__(self) -> str:
        return f"<Program {self.name}: {_shape(self)}>"


def template_text(template: Template, heading: str = "") -> str:
    """Prints a template as a Python function whose state is keyword-only."""
    lines = [heading] if heading else []
    lines.append(f"def {template.name}(")
    lines += [f'    {port.name}: "{port.spec}",' for port in template.inputs]
    if template.state:
        lines.append("    *,")
        lines += [f'    {port.name}: "{port.spec}",' for port in template.state]
    specs = ", ".join(f'"{port.spec}"' for port in template.outputs)
    lines.append(f") -> {specs if len(template.outputs) == 1 else f'({specs})'}:")
    modes = ""
    for node in template.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        here = _modes_text(node.meta["grad"], node.meta["autocast"])
        if here and here != modes:
            lines.append(f"    with {here}:")
        modes = here
        spec = f': "{node.meta["spec"]}"' if "spec" in node.meta else ""
        note = f"  # {node.meta['mask']}" if "mask" in node.meta else ""
        lines.append(f"    {'    ' if here else ''}{node.name}{spec} = {call_text(node)}{note}")
    outputs = ", ".join(port.name for port in template.outputs)
    lines.append(f"    return {outputs if len(template.outputs) == 1 else f'({outputs})'}")
    return "\n".join(lines)


def _modes_text(has_grad: bool, autocast: tuple[tuple[str, torch.dtype], ...]) -> str:
    modes = [] if has_grad else ["torch.no_grad()"]
    modes += [f"torch.autocast({d!r}, {t}, cache_enabled=False)" for d, t in autocast]
    return ", ".join(modes)


def _shape(program: Program) -> str:
    return f"{counted(len(program.blocks), 'block')}, {counted(len(program.templates), 'template')}"


def _program_text(program: Program) -> str:
    """Prints every template once and one line per block."""
    users: dict[str, list[int]] = defaultdict(list)
    for block in program.blocks:
        users[block.template].append(block.index)
    passes = f"; from {', '.join(program.provenance)}" if program.provenance else ""
    alignment = f"; state at multiples of {program.alignment} B" if program.alignment != ALIGNMENT else ""
    lines = [
        f"program {program.name}: {_shape(program)}{alignment}{passes}",
        f"  inputs {_list(program.inputs)}; outputs {_list(tuple(o.name for o in program.outputs))}",
    ]
    lines += [f"  buffer {value} = {key}" for value, key in program.buffers]
    lines += [f"  constant {value}: {program.values[value].spec}" for value in program.constants]
    lines += [f"  {'bind' if key in program.rebinds else 'commit'} {key} = {value}" for key, value in program.commits]
    lines += _part_lines(program)
    for block in program.blocks:
        frozen = "" if any(program.state[k].requires_grad for k in block.binding) or not block.binding else ", frozen"
        lines.append(
            f"  block {block.index} {block.name}: {block.template}({', '.join(block.inputs)}) -> "
            f"{_list(block.outputs)}; state {program.state_bytes(block)} bytes{frozen}"
        )
        lines += [f"    opaque {call.name or 'the model'}: {call.reason}" for call in program.opaque(block)]
    for template in program.templates.values():
        lines += ["", template_text(template, _heading(template, users[template.name]))]
    return "\n".join(lines)


def _heading(template: Template, blocks: Sequence[int]) -> str:
    """Says in one line which blocks run a template, and how much of the device one of them takes."""
    heading = f"# template {template.name}: block{'s' * (len(blocks) > 1)} {_ranges(blocks)}"
    if template.cost is None:
        return heading
    return f"{heading}; state {sum(port.spec.nbytes for port in template.state)} B, {template.cost}"


def _ranges(numbers: Sequence[int]) -> str:
    """Prints ascending numbers as `1-3, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _part_lines(program: Program) -> list[str]:
    """Prints each tensor that is cut into parts, with the rows of each part."""
    parts: dict[str, list[str]] = defaultdict(list)
    for entry in program.state.values():
        if entry.base is not None:
            parts[entry.base].append(f"[{entry.rows[0]}:{entry.rows[1]}]")
    return [f"  parts {base} = {' '.join(rows)}" for base, rows in parts.items()]


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names) if names else "nothing"


def shared_templates(program: Program) -> set[str]:
    """Names of the templates that several blocks run."""
    return {name for name, count in Counter(block.template for block in program.blocks).items() if count > 1}


def has_backward(program: Program, block: Block) -> bool:
    """Tells whether a gradient flows into `block`."""
    return any(program.values[name].requires_grad for name in block.outputs)


def trained_holders(program: Program) -> dict[str, tuple[int, ...]]:
    """The blocks that hold each parameter for which there is a gradient: the one that updates it, then the others.

    That is the first with a backward: backwards run in reverse, so its gradients are the last to be added. An
    optimizer updates a parameter as a whole, so a block that holds some of its rows holds the parameter.
    """
    found: dict[str, list[int]] = {}
    for index, block in enumerate(program.blocks):
        for name in dict.fromkeys(program.state[k].owner for k in block.binding if program.state[k].requires_grad):
            found.setdefault(name, []).append(index)
    owned: dict[str, tuple[int, ...]] = {}
    for name, blocks in found.items():
        owner = next((b for b in blocks if has_backward(program, program.blocks[b])), None)
        if owner is not None:
            owned[name] = (owner, *(b for b in blocks if b != owner))
    return owned
