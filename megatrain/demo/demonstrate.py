"""demonstrate(): the demo from the model to the comparison with eager PyTorch, printed as it goes."""

from __future__ import annotations

from typing import Any

import megatrain
from megatrain.checks import checked, number, optional
from megatrain.counts import counted
from megatrain.demo.course import Course
from megatrain.demo.demo_processes import DemoProcesses
from megatrain.demo.figures import format_losses, format_memory, quoted
from megatrain.demo.model import build_model, check_windows, held_out_loss, state_bytes, write_sample
from megatrain.demo.text import byte_tensor, random_batches, read_corpus, unigram_entropy
from megatrain.demo.training import Training
from megatrain.sizes import format_bytes, parse_bytes


@checked(interrupt_at=optional(number(above=0, below=1, example=0.5)))
def demonstrate(course: Course, *, interrupt_at: float | None = None, several: DemoProcesses | None = None) -> bool:
    """Trains, measures, samples, shows the schedule that ran and verifies it; prints all of it.

    Args:
        course: What is trained, from its beginning or from its checkpoint.
        interrupt_at: After which part of the steps this process interrupts itself; None doesn't.
        several: The processes that train together; None for one alone. The first one does all but train.

    Returns:
        Whether the model learnt, the device stayed within the budget, and the gradients are eager PyTorch's.

    Raises:
        OptionError: If a step takes more text than is held out.
        KeyboardInterrupt: Saying what is saved, if something is.
    """
    try:
        return _demonstrate(course, interrupt_at, several or DemoProcesses())
    except KeyboardInterrupt as interrupt:
        if course.saved is None:
            raise
        raise KeyboardInterrupt(course.describe_saved()) from interrupt


def _demonstrate(course: Course, interrupt_at: float | None, several: DemoProcesses) -> bool:
    recipe = course.recipe
    budget = parse_bytes(recipe.memory)
    training, held_out = read_corpus()
    check_windows(held_out, recipe)
    model = build_model(recipe)
    options: dict[str, Any] = {"memory": budget, "transfer": "copy", "process_group": several.group}
    compiled = megatrain.compile(model, device=recipe.device, **options)
    device = compiled.megatrain.options.device.torch_device
    weights = state_bytes(model)
    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, {format_bytes(weights)}"
    print(f"model   {type(model).__name__}, {size}")
    print(f"text    Python's own help pages: {len(training)} bytes to train on, {len(held_out)} held out")
    print(f"device  {device}, with a budget of {format_bytes(budget)}", flush=True)
    print(several, end="", flush=True)
    schedule, measured = _train(compiled, course, training, interrupt_at, several)
    found = not several.is_first or _shown(compiled, course, schedule, measured, weights)
    several.wait()
    return found


def _shown(
    compiled: megatrain.CompiledModule, course: Course, schedule: megatrain.Schedule, measured: int, weights: int
) -> bool:
    """Prints what the training has led to; see `demonstrate`."""
    recipe, (training, held_out) = course.recipe, read_corpus()
    device, budget = compiled.megatrain.options.device.torch_device, parse_bytes(recipe.memory)
    loss, baseline = held_out_loss(compiled, held_out, recipe, device), unigram_entropy(training, held_out)
    print(f"\nheld-out loss, nats per byte\n{format_losses(loss, baseline)}", flush=True)
    print(f"\na sample it wrote\n{quoted(write_sample(compiled, b'The ', recipe, device))}")
    print(f"\nthe schedule of a training step\n{schedule}")
    print(f"\ndevice memory\n{format_memory(weights, budget, schedule, measured)}\n", flush=True)
    report = _verify(compiled, training, course)
    print(report)
    return loss < baseline and compiled.megatrain.peak_bytes <= budget and report.ok


def _train(
    compiled: megatrain.CompiledModule, course: Course, text: bytes, interrupt_at: float | None, several: DemoProcesses
) -> tuple[megatrain.Schedule, int]:
    """Returns the schedule of a step and the measured peak of all, 0 if no step was left to make."""
    training = Training(compiled, course, text, interrupt_at=interrupt_at, several=several)
    step, recipe = training.step, course.recipe
    compiled.train()
    batch = training.batch()
    compiled.megatrain.prepare(**batch[0])  # the call that is compared with eager in the end has to fit, too
    planned = step.prepare(batch)
    program = compiled.megatrain.program
    blocks = f"{counted(len(program.blocks), 'block')} over {counted(len(program.templates), 'template')}"
    batches, ticks = counted(recipe.micro_batches, "micro-batch"), counted(len(planned.ticks), "tick")
    print(f"plan    {blocks}, {batches}, {ticks} a step")
    if course.saved is not None:
        print(f"resume  from `{course.folder}`: step {course.saved} of {course.total}, after {course.seconds:.0f} s")
    print(flush=True)
    training.run()
    num_steps = step.progress.count
    num_tokens, seconds = num_steps * recipe.tokens_per_step, course.seconds
    made = f"{counted(num_steps, 'step')}, {counted(num_tokens, 'token')}"
    print(f"\n{made} in {seconds:.0f} s, {num_tokens / seconds:.0f} tokens/s")
    print(
        f"saved in `{course.folder}`: the model for `from_pretrained`, and everything that training needs to continue"
    )
    return step.schedule, compiled.megatrain.peak_bytes


def _verify(compiled: megatrain.CompiledModule, text: bytes, course: Course) -> megatrain.Report:
    """Compares with eager PyTorch under the options that the training ran with."""
    options = compiled.megatrain.options
    ids = next(random_batches(byte_tensor(text), course.recipe)).to(options.device.torch_device)
    compiled.train()
    same = {"device": options.device, "memory": options.memory, "transfer": options.transfer}
    return megatrain.verify(compiled.megatrain.model, compile_options=same, input_ids=ids, labels=ids)
