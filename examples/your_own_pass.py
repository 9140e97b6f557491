"""Your own pass: the loss of a language model without logits for all tokens at once.

Run it from the folder of the repository: python examples/your_own_pass.py
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import megatrain

WORDS = 8192


def chunked_cross_entropy(traced, *, rows=64):
    """Replaces cross_entropy(linear(hidden, weight), labels) by sums over chunks of `rows` tokens."""
    rewriter = megatrain.Rewriter(traced)
    for loss in rewriter.calls(F.cross_entropy):
        logits: Any = loss.args[0]
        labels, options = loss.args[1], loss.kwargs
        while logits.target in ("view", "reshape", "flatten"):
            logits = logits.args[0]
        is_plain = options["reduction"] == "mean" and options["weight"] is None and not options["label_smoothing"]
        if logits.target is not F.linear or not is_plain:
            continue
        add, ignored = partial(rewriter.call, loss), options["ignore_index"]
        hidden = add("flatten", logits.args[0], 0, -2)
        sums = []
        for chunk, target in zip(add("split", hidden, rows), add("split", labels, rows), strict=True):
            part = add(F.linear, chunk, *logits.args[1:])
            sums.append(add(F.cross_entropy, part, target, ignore_index=ignored, reduction="sum"))
        num_counted = add("sum", add("ne", labels, ignored))
        rewriter.replace(loss, add("div", add("sum", add(torch.stack, sums)), num_counted))
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
        logits = self.head(self.layers(self.embed(ids)))
        return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1))


if __name__ == "__main__":
    model, ids = Model(), torch.randint(WORDS, (4, 64))
    compiled = megatrain.compile(model, device="cpu", passes=[chunked_cross_entropy], example_args=(ids, ids))
    print(compiled.program)
    print(megatrain.verify(model, ids, ids, device="cpu", compile_options={"passes": [chunked_cross_entropy]}))
