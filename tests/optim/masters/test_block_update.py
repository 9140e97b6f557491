"""An optimizer over bf16 parameters with split masters leaves the bits that it leaves over fp32 parameters."""

import pytest
import torch

from megatrain.errors import OptimizerError
from megatrain.optim.block_update import MasterStep
from megatrain.optim.blockwise import BlockOptimizer
from megatrain.optim.impostor import is_same
from megatrain.optim.masters.halves import RoundedMaster, SplitMaster, WholeMaster, read_
from megatrain.optim.norm import GradientNorm

SHAPES = ((50, 30), (30,), (40, 40), (7,), (20, 10))
NORMS = (1, 3)  # stay fp32
BLOCKS = ((0, 1), (2, 3), (4,))

MAKERS = {
    "adamw": lambda ps: torch.optim.AdamW([{"params": ps[:2]}, {"params": ps[2:], "weight_decay": 0.0}], fused=True),
    "adamw amsgrad": lambda ps: torch.optim.AdamW(ps, amsgrad=True),
    "adam": lambda ps: torch.optim.Adam(ps, weight_decay=0.1),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True, maximize=True),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=1e-2),
}


def sides():
    """Makes fp32 parameters, the same as bf16 parameters, and the masters of these."""
    generator = torch.Generator().manual_seed(0)
    wide = [torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.02) for shape in SHAPES]
    narrow, masters = [], {}
    for index, p in enumerate(wide):
        if index in NORMS:
            narrow.append(torch.nn.Parameter(p.detach().clone()))
            if index == NORMS[0]:  # the other has no master at all
                masters[narrow[-1]] = WholeMaster(narrow[-1].detach())
            continue
        master = SplitMaster.of(p.detach())
        narrow.append(torch.nn.Parameter(master.high))
        masters[narrow[-1]] = master
    return wide, narrow, masters


def set_gradients(wide, narrow, gradients, generator: torch.Generator) -> None:
    for p, q in zip(wide, narrow, strict=True):
        p.grad = torch.randn(p.shape, generator=generator)
        if q.dtype == torch.bfloat16:
            gradients[q] = p.grad.clone()  # as in a slab: fp32, beside the bf16 parameter
        else:
            q.grad = p.grad.clone()


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("name", MAKERS)
def test_twenty_clipped_steps_block_by_block_leave_the_bits_of_fp32(name: str, max_norm: float | None):
    wide, narrow, masters = sides()
    gradients: dict[torch.Tensor, torch.Tensor] = {}
    whole, parts = MAKERS[name](wide), MAKERS[name](narrow)
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=10) for o in (whole, parts)]
    code = MasterStep(masters, gradient_of=lambda p: gradients.get(p, p.grad))
    blocks = BlockOptimizer(parts, [[narrow[i] for i in block] for block in BLOCKS], code=code)
    norm, generator = GradientNorm(narrow), torch.Generator().manual_seed(1)
    for step in range(20):
        norm.begin()
        set_gradients(wide, narrow, gradients, generator)
        for index, block in enumerate(BLOCKS):
            norm.add(index, {narrow[i]: gradients.get(narrow[i], narrow[i].grad) for i in block})
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(wide, max_norm)
            code.scale = norm.coefficient(max_norm).item()
        whole.step()
        blocks.begin()
        for block in ((2, 0, 1), (0, 1, 2))[step % 2]:
            blocks.update(block)
        blocks.finish()
        for schedule in schedules:
            schedule.step()
    for index, (p, q) in enumerate(zip(wide, narrow, strict=True)):
        assert is_same(whole.state.get(p), parts.state.get(q))
        assert torch.equal(read_(torch.empty(p.shape), masters[q]) if q in masters else q, p)
        if index not in NORMS:
            assert q.dtype == torch.bfloat16
            assert q.data_ptr() == masters[q].high.data_ptr()
            assert q.grad is None


def test_a_failing_step_leaves_parameters_bf16_and_in_place():
    _, narrow, masters = sides()
    before = [p.detach().clone() for p in narrow]

    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("out of luck")

    for p in narrow:
        p.grad = torch.ones_like(p)
    code = MasterStep(masters)
    blocks = BlockOptimizer(Failing(narrow, lr=1.0), [narrow], code=code)
    blocks.begin()
    with pytest.raises(RuntimeError, match="out of luck"):
        blocks.finish()
    for p, b in zip(narrow, before, strict=True):
        assert torch.equal(p, b)
        assert p.dtype == b.dtype
        assert p.grad is not None
        assert p.grad.dtype == p.dtype


def test_masters_that_are_rounded_by_chance_take_the_fused_update():
    start = torch.randn(1000).bfloat16()
    results = []
    for _ in range(2):
        p = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.AdamW([p], lr=1e-3)
        p.grad = torch.ones_like(p)
        code = MasterStep({p: RoundedMaster(p.data, torch.Generator().manual_seed(0))})
        blocks = BlockOptimizer(optimizer, [[p]], code=code)
        blocks.begin()
        blocks.update(0)
        blocks.finish()
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32
        results.append(p.detach().clone())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], start)


def test_moments_that_were_narrowed_by_loading_are_refused():
    _, narrow, masters = sides()
    optimizer = torch.optim.AdamW(narrow)
    for p in narrow:
        p.grad = torch.ones_like(p)
    code = MasterStep(masters)
    code(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(OptimizerError, match="moments of a"):
        code(optimizer)


def test_state_that_was_made_in_bf16_is_refused_before_anything_is_written():
    """Adagrad makes its sums when it is made, and `load_state_dict` converts what it loads."""
    _, narrow, masters = sides()
    made = {"adagrad": torch.optim.Adagrad(narrow, lr=0.1), "loaded": torch.optim.SGD(narrow, lr=0.1, momentum=0.9)}
    for p in narrow:
        made["loaded"].state[p]["momentum_buffer"] = torch.zeros_like(p)
    before = [p.detach().clone() for p in narrow]
    for optimizer in made.values():
        for p in narrow:
            p.grad = torch.ones_like(p)
        with pytest.raises(OptimizerError, match=r"(?s)is torch.bfloat16, its master is fp32.*before compile"):
            MasterStep(masters)(optimizer)
        assert all(torch.equal(p, b) for p, b in zip(narrow, before, strict=True))


def test_adagrad_made_before_the_parameters_are_bf16_has_the_bits_of_fp32():
    wide, narrow, masters = sides()
    for p in narrow:
        p.data = p.detach().float()
    whole, parts = torch.optim.Adagrad(wide, lr=0.1), torch.optim.Adagrad(narrow, lr=0.1)
    for p in narrow:
        if isinstance(masters.get(p), SplitMaster):
            p.data = masters[p].high
    gradients: dict[torch.Tensor, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        set_gradients(wide, narrow, gradients, generator)
        whole.step()
        MasterStep(masters, gradient_of=lambda p: gradients.get(p, p.grad))(parts)
    for p, q in zip(wide, narrow, strict=True):
        master = masters.get(q)
        values = q.detach() if master is None else read_(torch.empty(master.shape), master)
        assert torch.equal(values, p.detach())
