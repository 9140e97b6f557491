"""compile(): a model whose calls run on a static schedule, with its state in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatrain.base.checks import checked, optional
from megatrain.base.torch_private import DisableTorchFunctionSubclass
from megatrain.device import Device, usable
from megatrain.errors import OptionError
from megatrain.files.weight_files import WeightFiles
from megatrain.hardware.hardware import Hardware
from megatrain.optim.masters.narrow_model import narrowed
from megatrain.passes.pipeline import Rewrite
from megatrain.planning.options import COMPILE, Limits, given_bytes, given_paths
from megatrain.ranks.processes import PROCESS_GROUP, ProcessGroup, check_cards, check_ranks
from megatrain.runtime.streams.stream_set import Chaos, Recording
from megatrain.training.compiled.inside import Compiled
from megatrain.training.compiled.module import CompiledModule, compiled_module


@checked(**COMPILE, process_group=optional(PROCESS_GROUP))
def compile(  # noqa: PLR0913  # the name torch users expect; all but the model are keywords
    model: nn.Module,
    *,
    device: Device | torch.device | str | None = None,
    memory: int | str | None = None,
    precision: str = "fp32",
    activations: str = "auto",
    transfer: str = "auto",
    block_bytes: int | str | None = None,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    weights: WeightFiles | None = None,
    masters: str = "exact",
    opaque: str = "warn",
    passes: Sequence[Rewrite] = (),
    hardware: Hardware | str | None = None,
    chunking: str = "auto",
    kernels: str = "auto",
    lengths: int | None = None,
    process_group: ProcessGroup | None = None,
    chaos: Chaos | None = None,
    recording: Recording | None = None,
) -> CompiledModule:
    """Makes a model train with its parameters in host memory, a few blocks at a time on the device.

    Args:
        model: Any nn.Module. Parameters on the CPU, or on meta to plan without weights.
        device: Compute device: its name, a torch.device or a `megatrain.device.Device`; default: the accelerator if
            there is one, else the CPU.
        memory: Device-memory budget: bytes, or text like `"10GiB"`; None takes what is free, less a margin.
        precision: `"fp32"`: compute in the parameters' own dtype. `"bf16"`: fp32 parameters become bf16 now, staying
            the same objects, and fp32 inputs are cast at each call; the bits that trained parameters lose are kept in
            `compiled.masters`. A model with bf16 parameters stays as it is, and so do its inputs.
        activations: What happens to a block's saved values: `"keep"` holds them on the device, `"recompute"` holds the
            block's inputs and recomputes (activation checkpointing), `"offload"` parks the inputs on the host
            (activation offloading), `"auto"` keeps as much as the budget allows.
        transfer: `"copy"` weights into slots, or `"bind"` them in place where the compute device is the host;
            `"auto"` binds on the CPU unless a `memory` budget is given.
        block_bytes: Target size of a block's state; None takes the model's own repeated modules.
        example_args: With `example_kwargs`: compile for this call now, else at the first call.
        example_kwargs: See `example_args`.
        weights: Safetensors files with the values of all parameters and persistent buffers: a file, a folder, an
            index, or a list of them. Checked now from their headers; read at the first call, or by
            `load_weights`, straight into host memory. Existing values of the model are replaced.
        masters: With `precision="bf16"`: `"exact"` fp32 masters, or `"rounded"` for none: updates of the bf16
            parameters are rounded up or down at random (stochastic rounding).
        opaque: What happens if code in the outermost module can't be captured, so that the whole model is one block:
            `"warn"` with an `OpaqueModelWarning`, `"refuse"` with a TraceError, or `"allow"`.
        passes: Your own rewrites, each a function `TracedModule -> TracedModule`: a capture goes through them in order,
            is checked after each, and is then cut into blocks. `print(compiled.program)` names them. See
            docs/passes.md.
        hardware: The machine for which a `TrainStep` is planned: of several plans that fit the memory the step takes
            the one that is fastest there. `"measured"` is this machine, measured in a few seconds and remembered; or a
            `megatrain.Hardware`, or the name of one in `Hardware.presets()`. None compares no plans, and weighs copies
            against compute as the card does, if its name is known, or as an RTX 4090. To compare plans takes up to
            some seconds for each new shape of batches.
        chunking: When a head (`linear`, then `cross_entropy`) computes its loss in chunks of rows, so that its logits
            never exist whole (chunked cross-entropy), and calls that treat each token alone run tile by tile of tokens
            (token tiling), and masks of attention that are functions of positions aren't materialised: `"auto"` in
            training steps that don't fit the memory otherwise, `"always"` wherever they can, or `"never"`. Gradients of
            weights, and of what all tokens share, are then sums over chunks and tiles; all else has the same bits on
            the CPU. See docs/tasks/long-documents.md.
        kernels: `"eager"` computes each block by eager PyTorch's own calls, with its bits. `"graphs"` launches the same
            kernels by one call for each block (CUDA graphs), with the same bits, and retains no graph for the backward.
            `"auto"` is one of the two on CUDA: from the third run of a shape on, the one whose plan is shorter by its
            simulated time; elsewhere it is `"eager"`.
            `"inductor"` compiles the forward and the backward of each template once, by torch.compile; all blocks of
            the template share the result. Numbers differ by rounding. A template for which one of these is impossible
            runs as with `"eager"`: `print(compiled)` says why. See docs/kernels.md.
        lengths: Batches are padded to the next multiple of so many tokens in a row, such as 1024, before they are
            captured and run, so that batches of any length have few captures. Outputs have the batch's own length, and
            losses and gradients are those of the batch without padding, up to the rounding of kernels that get other
            shapes. A model whose real tokens notice padding is refused after a trial. None pads nothing. See
            docs/trainers.md, "Batches of many shapes".
        process_group: Processes that train the model together, such as `torch.distributed.group.WORLD` under torchrun;
            all of them call `compile` at the same time. Each gives a `TrainStep` micro-batches of its own, and all make
            the same updates. They are processes of one host, and share one store. See docs/several-devices.md.
        chaos: Random delays, poisoned slots and injected faults; for tests.
        recording: Collects the operations that the executor issued; for tests.

    Returns:
        A module to call like the model. Its parameters are the model's own.

    Raises:
        OptionError: If an option has a wrong value, or a parameter's dtype doesn't fit the precision.
        TraceError: If the model can't be captured faithfully (now, or at the first call).
        LowerError: If one of `passes` doesn't return such a graph, or breaks a rule (now, or at the first call).
        ScheduleError: If `memory` is too small for the largest block.
        WeightsError: If `weights` can't be read, or don't fit the model.
        RanksError: If another process of `process_group` doesn't call `compile`, or ends meanwhile; or if they can't
            share memory.
    """
    if isinstance(model, CompiledModule):
        raise OptionError(
            "the model is compiled already.\n  A compiled model already holds its parameters in a host store.\n"
            "  Use it as it is, or compile the plain model again: compile(compiled.megatrain.model, ...)."
        )
    options = Limits(
        device=usable(device),
        device_memory=given_bytes(memory, "memory"),
        precision=precision,
        masters=masters,
        activations=activations,
        transfer=transfer,
        block_bytes=given_bytes(block_bytes, "block_bytes"),
        passes=tuple(passes),
        chunking=chunking,
        kernels=kernels,
        weights=given_paths(weights),
        opaque=opaque,
        lengths=lengths,
    ).resolved(hardware)
    check_ranks(process_group, kernels, masters)
    _check_counts_writes(model)
    if lengths is not None and process_group is not None:
        raise OptionError(
            f"lengths={lengths} is for a process that trains alone, and process_group= is given.\n"
            "  Padding is tried before the first batch of each kind, and processes may meet kinds at different times.\n"
            "  Leave lengths= out, and let your collator pad to a multiple."
        )
    compiled = Compiled(model, options, chaos, recording, process_group)
    if compiled.ranks is not None:
        check_cards(compiled.ranks, options.device)
        compiled.budget.agree(compiled.ranks.exchange)
    module = compiled_module(compiled)
    with narrowed(model, compiled.masters):
        if compiled._weights is not None:
            compiled._weights.remember(model)
        if example_args or example_kwargs:
            compiled.prepare(*example_args, **dict(example_kwargs or {}))
        return module  # inside the body: Ctrl-C after it would leave a bf16 model and no compiled model


def _check_counts_writes(model: nn.Module) -> None:
    """Refuses tensors of torch.inference_mode, which count no writes."""
    with DisableTorchFunctionSubclass():  # a question to tensors of any class, also to those without values yet
        made = [
            f"{kind} `{name}`"
            for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers()))
            for name, tensor in named
            if tensor.is_inference()
        ]
    if made:
        raise OptionError(
            f"{made[0]} was made under torch.inference_mode().\n"
            "  Such tensors count no writes, so nothing tells when the device has old values of them.\n"
            "  Make or load the model outside of it, or compile copy.deepcopy(model)."
        )
