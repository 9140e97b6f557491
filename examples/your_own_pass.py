"""Your own pass: the loss of a language model without logits for all tokens at once.

Run it from the folder of the repository: python examples/your_own_pass.py
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.passes import Rewriter, check_rewrite

WORDS = 8192


def head_loss(hidden, weight, labels, ignored):
    """The pattern: a cross-entropy of the result of a linear layer without a bias."""
    return F.cross_entropy(F.linear(hidden, weight), labels, ignore_index=ignored)


def chunked_cross_entropy(traced, *, rows=64):
    """Replaces the mean loss of a head by sums over chunks of `rows` tokens."""
    rewriter = Rewriter(traced)
    for match in rewriter.matches(head_loss, through=("view", "reshape", "flatten")):
        hidden, weight, labels, ignored = match.given.values()
        spec = hidden.meta["spec"]
        if labels.meta["spec"].shape != (spec.numel // spec.shape[-1],):
            continue  # labels that are probabilities, or logits that were regrouped: not this loss
        add, sums = partial(rewriter.call, match.result), []
        chunks, targets = add("split", add("flatten", hidden, 0, -2), rows), add("split", labels, rows)
        for chunk, target in zip(chunks, targets, strict=True):
            part = add(F.cross_entropy, add(F.linear, chunk, weight), target, ignore_index=ignored, reduction="sum")
            sums.append(part)
        counted = add("sum", add("ne", labels, ignored))
        rewriter.replace(match.result, add("div", add("sum", add(torch.stack, sums)), counted))
    return rewriter.done()


class Model(nn.Module):
    """An embedding, layers and a head; returns the loss."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 64)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(64, WORDS, bias=False)

    def forward(self, ids, labels):
        """Returns the mean loss of the labels."""
        return F.cross_entropy(self.head(self.layers(self.embed(ids))).view(-1, WORDS), labels.view(-1))


if __name__ == "__main__":
    model, ids = Model(), torch.randint(WORDS, (4, 64))
    compiled = megatrain.compile(model, device="cpu", passes=[chunked_cross_entropy], example_args=(ids, ids))
    print(compiled.program, check_rewrite(model, chunked_cross_entropy, (ids, ids)), sep="\n")
    print(megatrain.verify(model, ids, ids, device="cpu", compile_options={"passes": [chunked_cross_entropy]}))
