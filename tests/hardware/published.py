"""Whole training steps that others published, each as the bytes, kernels and recomputation of its own system.

A step becomes workloads of the scheduler, and `simulate` on a machine of the table says how long they take: the same
way as a step of ours. What a system does is from its documentation; no figure is fitted to a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatrain.hardware.hardware import Hardware
from megatrain.hardware.work import MEMORY, Kernels, Works
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.workload import BlockWork, ValueWork, Workload

LENGTH = 1024  # of each sequence, in all rows
STEP = 512 * LENGTH


class Shape(NamedTuple):
    """A language model of Llama's kind.

    Attributes:
        depth: Layers.
        width: Of a token.
        inner: Of the layers' second half.
        keys: Width of the keys, and of the values.
        vocabulary: Words.
        is_tied: Whether head and embedding are one.
    """

    depth: int
    width: int
    inner: int
    keys: int
    vocabulary: int
    is_tied: bool = False

    @property
    def weights(self) -> int:
        """Parameters of a layer."""
        return self.width * (2 * self.width + 2 * self.keys + 3 * self.inner)


# Qwen2.5's, and Llama 3.1's of 8B.
SHAPES: Mapping[str, Shape] = {
    "0.5B": Shape(24, 896, 4864, 128, 151936, is_tied=True),
    "1.5B": Shape(28, 1536, 8960, 256, 151936, is_tied=True),
    "3B": Shape(36, 2048, 11008, 256, 151936, is_tied=True),
    "7B": Shape(28, 3584, 18944, 512, 152064),
    "8B": Shape(32, 4096, 14336, 1024, 128256),
    "14B": Shape(48, 5120, 13824, 1024, 152064),
}


@dataclass(frozen=True, slots=True)
class System:
    """How a system trains.

    Args:
        name: Printed.
        recomputes: What a backward computes again: `"nothing"`, `"activation"` (of the layers' second half),
            `"second half"` (its products as well, all but the last), `"both halves"` (queries, keys, values and
            attention as well), `"layer"` (the product after attention as well: all but the last), or `"everything"`.
        streams: Whether weights come from the host for each forward and backward.
        lands: Whether gradients leave for the host after each backward.
        update: Bytes of host memory that an update reads and writes for each parameter, after all else; 0 if the
            optimizer is on the card, which takes next to no time there.
        is_torch: Whether torch launches kernels, one by one, and sums residuals by kernels of their own. Else CUDA
            graphs launch kernels that do so together with the norm that follows.
    """

    name: str
    recomputes: str = "nothing"
    streams: bool = False
    lands: bool = False
    update: int = 0
    is_torch: bool = False


# Sources: LLMQ, github.com/IST-DASLab/llmq: doc.md says what each switch computes again, the pages of benchmarks/ which
# switches a row has. All products and states are bf16. A row's figure is that of the last step printed.
_CARD = System("LLMQ")
# LLMQ's moments and masters cross to the card and back, 2 bytes each.
_MOMENTS, _STATES = 8, 12
# DeepSpeed's CPUAdam reads and writes an fp32 parameter and two moments, reads its fp32 gradient and writes bf16.
_OF_ZERO = 30
_ZERO3 = System("ZeRO-3", "everything", streams=True, lands=True, update=_OF_ZERO, is_torch=True)
_TORCH = System("torch", "everything", is_torch=True)


class Row(NamedTuple):
    """A published step.

    Attributes:
        machine: A machine of the table.
        model: One of `SHAPES`.
        system: What trained.
        sequences: In a micro-batch.
        count: Micro-batches of a step.
        tokens_per_s: As published.
        source: Where.
    """

    machine: str
    model: str
    system: System
    sequences: int
    count: int
    tokens_per_s: float
    source: str


_4090, _5090, _5060, _H100, _PRO, _L40S = (
    f"LLMQ, {page}"
    for page in (
        "benchmarks/4090x1.md",
        "README.md, RTX 5090",
        "benchmarks/5060Ti.md",
        "benchmarks/H100x1.md",
        "benchmarks/Pro6000x1.md",
        "README.md, L40S",
    )
)
_FACTORY = f"LLaMA-Factory with Liger kernels, measured by {_4090}"
_SLIDE = "Liger kernels, measured by SlideFormer, bench/DeepSpeed"
_OFFLOADED = replace(_CARD, recomputes="layer", streams=True, update=_STATES)
_HALVES = replace(_CARD, recomputes="both halves")

PUBLISHED = (
    Row("rtx-4090", "0.5B", _CARD, 16, 32, 39842, _4090),
    Row("rtx-4090", "1.5B", _CARD, 4, 128, 14063, _4090),
    Row("rtx-4090", "3B", replace(_CARD, recomputes="activation", update=_MOMENTS), 4, 128, 7001, _4090),
    Row("rtx-4090", "7B", _OFFLOADED, 16, 32, 2777, _4090),
    Row("rtx-4090", "14B", replace(_OFFLOADED, lands=True), 32, 16, 1348, _4090),
    Row("rtx-4090", "1.5B", _TORCH, 16, 32, 9419, _FACTORY),
    Row("rtx-4090", "3B", replace(_ZERO3, name="ZeRO-2", streams=False), 48, 11, 5448, _FACTORY),
    Row("rtx-4090", "7B", _ZERO3, 32, 16, 2523, _FACTORY),
    Row("rtx-4090", "14B", _ZERO3, 20, 26, 1135, _FACTORY),
    Row("rtx-4090", "8B", _ZERO3, 32, 1, 1791, _SLIDE),
    Row("rtx-4090", "8B", _ZERO3, 16, 1, 1373, _SLIDE),
    Row("rtx-4090", "8B", _ZERO3, 8, 1, 914, _SLIDE),
    Row("rtx-5090", "1.5B", _HALVES, 8, 64, 17000, _5090),
    Row("rtx-5090", "3B", _HALVES, 8, 64, 8600, _5090),
    Row("rtx-5090", "7B", replace(_HALVES, streams=True, update=_STATES), 8, 64, 3100, _5090),
    Row("rtx-5060-ti", "0.5B", _CARD, 10, 51, 13009, _5060),
    Row("rtx-5060-ti", "1.5B", _HALVES, 8, 64, 3899, _5060),
    Row("rtx-5060-ti", "7B", replace(_OFFLOADED, lands=True), 32, 16, 889, _5060),
    Row("rtx-pro-6000", "1.5B", _CARD, 32, 16, 32401, _PRO),
    Row("rtx-pro-6000", "3B", _CARD, 16, 32, 17186, _PRO),
    Row("rtx-pro-6000", "7B", _CARD, 8, 64, 8080, _PRO),
    Row("rtx-pro-6000", "14B", replace(_CARD, update=_MOMENTS), 4, 128, 4038, _PRO),
    Row("l40s", "1.5B", _CARD, 8, 64, 17000, _L40S),
    Row("l40s", "3B", _CARD, 4, 128, 8900, _L40S),
    Row("l40s", "7B", replace(_CARD, recomputes="activation", update=_MOMENTS), 4, 128, 3900, _L40S),
    Row("h100-sxm", "1.5B", _CARD, 32, 16, 59101, _H100),
    Row("h100-sxm", "3B", _CARD, 16, 32, 30958, _H100),
    Row("h100-sxm", "7B", _CARD, 4, 128, 13863, _H100),
    Row(
        "h100-sxm", "14B", replace(_CARD, recomputes="second half", update=_STATES), 8, 64, 6321, _H100
    ),
)  # fmt: skip


# Published figures that aren't rows, and why.
LEFT_OUT: Mapping[str, str] = {
    "LLMQ's README, RTX 4090: 7B 1.9k, 3B 6.2k, and its README's figures of the H100 and the PRO 6000": (
        "of earlier code and smaller micro-batches: the pages of benchmarks/ have 2,777 and 7,001 for the same models"
    ),
    "LLMQ in fp8": "the table of machines has no rate of fp8",
    "LLMQ on four cards": "one card is simulated",
    "LLMQ, RTX 5090, 7B in micro-batches of 4: 2.5k": "the row of 8 has the same switches; small products reach less",
    "RoundPipe, RTX 4090: 8B 3,142, 32B 740, 1.7B 8,881": (
        "products are summed in fp16, updates are a step late, and tokens of a step aren't said"
    ),
    "MegaTrain, all machines": (
        "padding counts as work, its RTX 3090 rows need 50 of 71 TFLOP/s next to 7 s of copies in 9 s, a table of the "
        "H100 was deleted by its authors, and steps of several cards skip the update"
    ),
    "MegaTrain's port to the MI355X": "as MegaTrain, and no product of an MI355X is published",
    "ZeRO-3 on a GH200, 14B 1,613": "by MegaTrain's authors, whose tokens of a step aren't said",
    "SuperOffload, GH200: up to 600 TFLOP/s": "an upper end, whose model and count of recomputation aren't said",
    "LazyTrain, H800": "a link of 12 GB/s, which no machine of the table has",
    "LoHan, RTX 4090": "states are on 12 SSDs",
    "MegaTrain-Plus, DGX Spark": "no optimizer ran",
    "KTransformers": "experts are computed on the host",
    "prime-rl's FSDP2": "eight cards",
    "eager PyTorch and FSDP2 on an H100, 1.5B": "bound by launches, which nobody counted (docs/benchmarks.md)",
    "Unsloth, torchao, OneTrainer": "adapters, vision or another precision",
}


def _works(rate: str, flops: float, nbytes: float, number: int) -> Works:
    return (Kernels(rate, int(flops), int(nbytes), number),) if flops or nbytes else ()


def _other_bytes(shape: Shape, system: System) -> int:
    """Bytes per token of the kernels of a layer's forward other than products.

    Two norms, each with the sum before it, read and write two values (16 per element of a token, 20 if the sum is a
    kernel of its own); rotations read and write queries and keys, attention reads them with the values and writes as
    much as it reads of queries (8 each); the activation reads two halves and writes one (6).
    """
    norms = 20 if system.is_torch else 16
    return norms * shape.width + 8 * (shape.width + shape.keys) + 6 * shape.inner


def _recomputed(shape: Shape, system: System, tokens: int) -> Works:
    """The kernels that a backward of a layer computes again."""
    width, inner, keys, what = shape.width, shape.inner, shape.keys, system.recomputes
    halves = ("activation", "second half", "both halves", "layer", "everything")
    level = 0 if what == "nothing" else 1 + halves.index(what)
    weights = (level >= 2) * 2 * width * inner + (level >= 3) * width * (width + 2 * keys)
    weights += (level >= 4) * width * width + (level >= 5) * width * inner
    attention = 2 * LENGTH * width if level >= 3 else 0
    nbytes = (level >= 1) * 6 * inner + (level >= 2) * 8 * width + (level >= 3) * 8 * (2 * width + keys)
    nbytes = _other_bytes(shape, system) if what == "everything" else nbytes
    return (
        *_works("bf16", 2 * weights * tokens, 2 * weights, 7),
        *_works("bf16 attention", attention * tokens, 0, 1),
        *_works(MEMORY, 0, nbytes * tokens, 10),
    )


def _layer(shape: Shape, system: System, tokens: int) -> BlockWork:
    """A layer: causal attention computes half of all pairs, its backward takes 2.5 times as much, and others' twice."""
    weights, attention = shape.weights, 2 * LENGTH * shape.width * tokens
    others = _other_bytes(shape, system) * tokens
    forward = (
        *_works("bf16", 2 * weights * tokens, 2 * weights, 7),
        *_works("bf16 attention", attention, 0, 1),
        *_works(MEMORY, 0, others, 10),
    )
    backward = (
        *_recomputed(shape, system, tokens),
        *_works("bf16", 4 * weights * tokens, 4 * weights, 14),
        *_works("bf16 attention", int(2.5 * attention), 0, 1),
        *_works(MEMORY, 0, 2 * others, 20),
    )
    return _block("layer", weights, system, forward, backward)


def _block(name: str, weights: int, system: System, forward: Works, backward: Works) -> BlockWork:
    return BlockWork(
        name=name,
        state_bytes=2 * weights if system.streams else 0,
        gradient_bytes=2 * weights if system.lands else 0,
        saved_bytes=0,
        forward_workspace_bytes=0,
        backward_workspace_bytes=0,
        has_backward=True,
        forward=forward,
        backward=backward,
    )


def workload_of(row: Row) -> Workload:
    """A micro-batch of the row: the embedding, the layers, and the head with its loss."""
    shape, system, tokens = SHAPES[row.model], row.system, row.sequences * LENGTH
    words, width, depth = shape.vocabulary, shape.width, shape.depth
    rows = _works(MEMORY, 0, 4 * width * tokens, 2)
    # Logits are written, read and overwritten by their gradients, and read again, 2 bytes each.
    head = (
        *_works("bf16", 2 * words * width * tokens, 2 * words * width, 1),
        *_works(MEMORY, 0, 8 * words * tokens, 3),
    )
    back = _works("bf16", 4 * words * width * tokens, 4 * words * width, 2)
    blocks = (
        _block("embedding", words * width, system, rows, rows),
        *depth * (_layer(shape, system, tokens),),
        _block("head", 0 if shape.is_tied else words * width, system, head, back),
    )
    values = tuple(
        ValueWork(f"v{number}", 2 * width * tokens, number, number, (number + 1,), False, True, False)
        for number in range(depth + 1)
    )
    return Workload(blocks, values, (2 * width * tokens,) * len(values))


def _updated(row: Row, works: Workload) -> Iterator[BlockWork]:
    """The blocks with their update: where gradients land with each micro-batch, or with the last one."""
    shape = SHAPES[row.model]
    of_words = shape.vocabulary * shape.width
    weights = [of_words, *shape.depth * [shape.weights], 0 if shape.is_tied else of_words]
    for block, number in zip(works.blocks, weights, strict=True):
        state = max(block.state_bytes, int(number > 0))  # a block without any has no update
        yield replace(block, state_bytes=state, gradient_bytes=2 * number, update_bytes=row.system.update * number)


def seconds_of(row: Row, machine: Hardware) -> float:
    """Seconds of the step on a machine: of its micro-batches one after the other, and of an update after the last."""
    if not row.system.is_torch:
        machine = replace(machine, issue_s=0.0)
    works = workload_of(row)
    plain = schedule(works, activations="keep", outputs="release").simulate(machine).step_s
    if not row.system.update:
        return row.count * plain
    last = schedule(
        replace(works, blocks=tuple(_updated(row, works))), activations="keep", updates="serial", outputs="release"
    )
    return (row.count - 1) * plain + last.simulate(machine).step_s
