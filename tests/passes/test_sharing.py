"""dedup: layers share a template exactly if they differ in nothing but their state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatrain.passes.pipeline import lower
from megatrain.passes.program import Program
from megatrain.tracer.trace import trace
from tests import captures


@pytest.mark.parametrize("name", ["llama", "llama_labels", "llama_padded", "qwen2", "gpt2", "bert", "vit", "gpt"])
def test_all_layers_share_one_template(name: str):
    program = captures.program(name)
    layers = [b.template for b in program.blocks if b.name[-1].isdigit()]
    assert len(layers) == 3
    assert len(set(layers)) == 1
    assert len(program.templates) == 3


def test_depth_adds_blocks_but_no_template():
    from tests.models import Gpt

    ids = torch.zeros(1, 4, dtype=torch.int64)
    counts = [len(lower(trace(Gpt(depth=d), (ids,))).templates) for d in (2, 7)]
    assert counts == [3, 3]


class Layer(nn.Module):
    """A layer whose code is chosen by a function; its state has the same shapes whatever it does."""

    def __init__(self, body: Callable[[nn.Linear, torch.Tensor], torch.Tensor]):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.body = body

    def forward(self, x):
        return self.body(self.fc, x)


def _num_templates(*bodies: Callable[[nn.Linear, torch.Tensor], torch.Tensor]) -> int:
    program = lower(trace(nn.Sequential(*map(Layer, bodies)), (torch.randn(4, 4),)))
    assert len(program.blocks) == len(bodies)
    return len(program.templates)


def _no_grad(fc: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return fc(x)


def _autocast(fc: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return fc(x).float()


def _float(fc: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return fc(x).float()


DIFFERENT = {
    "activation": (lambda fc, x: F.relu(fc(x)), lambda fc, x: F.gelu(fc(x))),
    "dropout": (lambda fc, x: F.dropout(fc(x), 0.1), lambda fc, x: F.dropout(fc(x), 0.2)),
    "eps": (
        lambda fc, x: F.layer_norm(fc(x), (4,), eps=1e-5),
        lambda fc, x: F.layer_norm(fc(x), (4,), eps=1e-6),
    ),
    "literal": (lambda fc, x: fc(x) * 2, lambda fc, x: fc(x) * 3),
    "int or float": (lambda fc, x: fc(x).mul(1), lambda fc, x: fc(x).mul(1.0)),
    "bool or int": (
        lambda fc, x: fc(x).sum(1, keepdim=True) + x,
        lambda fc, x: fc(x).sum(-1, keepdim=True) + x,
    ),
    "sign of zero": (lambda fc, x: fc(x) + 0.0, lambda fc, x: fc(x) + -0.0),
    "window": (
        lambda fc, x: fc(x) * torch.ones(4, 4).tril(),
        lambda fc, x: fc(x) * torch.ones(4, 4).tril().triu(-2),
    ),
    "operands": (lambda fc, x: fc(x) - x, lambda fc, x: x - fc(x)),
    "in place": (lambda fc, x: torch.relu(fc(x)), lambda fc, x: torch.relu_(fc(x))),
    "grad mode": (lambda fc, x: fc(x), _no_grad),
    "autocast": (_float, _autocast),
    "view or copy": (lambda fc, x: fc(x).view(4, 4), lambda fc, x: fc(x).clone()),
    "slice": (lambda fc, x: fc(x)[0:2].repeat(2, 1), lambda fc, x: fc(x)[1:3].repeat(2, 1)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_layers_that_differ_in_code_have_their_own_templates(what: str):
    one, other = DIFFERENT[what]
    # Two of each, so that equal ones are seen to share; a last one ends the forward as the others do.
    assert _num_templates(one, one, _float) == _num_templates(one, _float)
    assert _num_templates(other, other, _float) == _num_templates(other, _float)
    assert _num_templates(one, other, one, _float) > _num_templates(one, one, _float)


def test_layers_that_differ_in_dtype_have_their_own_templates():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).double())
    model[1].register_forward_hook(lambda m, a, y: y.double())
    program = lower(trace(model, (torch.randn(2, 4),)))
    assert len(program.templates) == len(program.blocks) == 3


def test_aliasing_of_what_a_layer_returns_tells_templates_apart():
    class Twice(nn.Module):
        def __init__(self, is_view: bool):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.is_view = is_view

        def forward(self, pair):
            y = self.fc(pair[0] + pair[1])
            return y, y.view(4, 4) if self.is_view else y.clone()

    def count(*flags: bool) -> int:
        model = nn.Sequential(*map(Twice, flags))
        x = torch.randn(4, 4)
        return len(lower(trace(model, ((x, x * 2),))).templates)

    assert count(True, True) == 1
    assert count(True, False) == 2


@pytest.mark.parametrize(("p", "window", "expected"), [((0.1, 0.1), (None, None), 1), ((0.1, 0.2), (None, None), 2)])
def test_dropout_of_an_unmodified_module_is_part_of_its_code(p, window, expected):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(q)) for q in p))
    assert len(lower(trace(model, (torch.randn(2, 4),))).templates) == expected


def test_sliding_and_full_attention_layers_of_transformers_have_their_own_templates():
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, use_sliding_window=True, sliding_window=4, max_window_layers=2,
        use_cache=False,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    program = lower(trace(model, (), {"input_ids": torch.arange(16).view(2, 8)}))
    layers = [b.template for b in program.blocks if ".layers." in f".{b.name}"]
    assert len(layers) == 4
    full, sliding = program.blocks[1], program.blocks[3]
    # Same code, other mask: either the templates or the values they read must differ.
    assert (full.template, full.inputs[1:]) != (sliding.template, sliding.inputs[1:])


class _Names(nn.Module):
    def __init__(self, *names: str):
        super().__init__()
        self.names = names
        setattr(self, names[0], nn.Linear(4, 4))
        layers = [nn.Sequential() for _ in range(2)]
        for layer in layers:
            layer.add_module(names[1], nn.Linear(4, 4))
            layer.add_module(names[2], nn.BatchNorm1d(4))
            layer.add_module(names[3], nn.BatchNorm1d(4))
        setattr(self, names[4], nn.ModuleList(layers))

    def forward(self, x):
        x = getattr(self, self.names[0])(x)
        for layer in getattr(self, self.names[4]):
            x = layer(x)
        return x


def test_names_of_modules_change_names_of_ports_and_nothing_else():
    x = torch.randn(3, 4)
    one = lower(trace(_Names("a", "b", "c", "d", "e"), (x,)))
    other = lower(trace(_Names("zz", "norm_2", "y10", "y9", "a_list"), (x,)))
    assert _shape_of(one) == _shape_of(other)


def _shape_of(program: Program) -> list[object]:
    """All of a program but names: templates, what blocks read and define, what they compute."""
    place = {name: i for i, name in enumerate(program.values)}
    keys = {key: i for i, key in enumerate(program.state)}
    blocks = [
        (
            b.template,
            [place[v] for v in b.inputs],
            [place[v] for v in b.outputs],
            [keys[k] for k in b.binding],
        )
        for b in program.blocks
    ]
    calls = [
        (t.name, [(n.op, str(n.target)) for n in t.graph.nodes if n.op.startswith("call")], t.cost)
        for t in program.templates.values()
    ]
    ends = [
        [(keys[k], place[v]) for k, v in program.commits],
        [(place[v], keys[k]) for v, k in program.buffers],
    ]
    return [blocks, calls, ends]
