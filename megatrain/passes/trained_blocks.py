"""Which blocks have a backward, and which of them hold a parameter that is trained."""

from __future__ import annotations

from megatrain.passes.program import Block, Program


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
