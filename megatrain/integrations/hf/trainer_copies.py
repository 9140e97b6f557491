"""Copies of a trainer, with all that it holds: one as it is, and one of the class without the mixin."""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Container, Iterator, KeysView, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from megatrain.compiled.module import CompiledModule
from megatrain.errors import ExecuteError, OptionError
from megatrain.integrations.hf.stream_options import StreamOptions
from megatrain.optim.blockwise import has_hooks


def without(kind: type, mixin: type) -> type:
    """Returns a class with all of a class but what a mixin of it overrides.

    The methods of the class itself stay, and find the mixin's other bases through `super()`: the class is the same, and
    only the order in which methods are looked up lacks the mixin.
    """

    class Order(type(kind)):
        def mro(cls) -> list[type]:
            return [each for each in super().mro() if each is not mixin]

    return Order(kind.__name__, (kind,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def copied_trainer(trainer: Any, kind: type, folder: Path, *, left_out: Container[str], streams: bool) -> Any:
    """Copies a trainer that hasn't trained yet: its model, data, optimizers, callbacks, all of one piece.

    Functions are shared, and so are modules of Python; what replaces a method of the model (its `forward`) refers to
    the copy where it referred to the model. The copy's model is the plain one. It writes and reports nothing but into
    the folder, and logs each update.

    Args:
        trainer: Stays as it is.
        kind: Class of the copy.
        folder: In place of the output folder.
        left_out: Attributes that the copy does without.
        streams: The copy's other compiled models (a reference model) are those of the trainer, which don't train; else
            they are plain.

    Raises:
        OptionError: If something of the trainer can't be copied, by its name.
    """
    memo: dict[int, Any] = {id(module): module for module in list(sys.modules.values())}
    memo[id(trainer.accelerator)] = trainer.accelerator  # another one is made
    memo |= {id(each): None for each in trainer.callback_handler.callbacks if _only_reports(each)}
    if streams:
        memo |= {id(model): model for model in other_models(trainer)}
    copied: Any = object.__new__(kind)
    memo[id(trainer)] = copied
    for name, value in vars(trainer).items():
        if name not in left_out:
            vars(copied)[name] = _copy_of(name, value, memo)
    for module in copied.model.modules():
        for name, value in list(vars(module).items()):
            vars(module)[name] = _referring_to_copies(value, memo, {})
    handler = copied.callback_handler
    handler.callbacks = [each for each in handler.callbacks if each is not None]
    make_quiet(copied.args, folder)
    copied.args.logging_strategy, copied.args.logging_steps = IntervalStrategy.STEPS, 1
    copied.args.save_strategy, copied.args.load_best_model_at_end = SaveStrategy.NO, False
    return copied


def make_quiet(arguments: Any, folder: Path) -> None:
    """Has training arguments write and report nothing but into a folder."""
    arguments.output_dir = str(folder)
    arguments.push_to_hub = False
    arguments.report_to = []
    arguments.disable_tqdm = True


def with_quiet(
    arguments: Any, args: tuple[Any, ...], kwargs: dict[str, Any], folder: Path
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a constructor with quiet training arguments in place of the user's, which stay.

    Args:
        arguments: The training arguments among them; or None.
        args: By position.
        kwargs: By name.
        folder: See `make_quiet`.
    """
    if arguments is None:
        return args, kwargs
    quiet = copy.copy(arguments)
    make_quiet(quiet, folder)
    positional = tuple(quiet if value is arguments else value for value in args)
    return positional, {name: quiet if value is arguments else value for name, value in kwargs.items()}


def refuse_to_repeat(trainer: Any, options: StreamOptions, tolerance: float | None, given: Mapping[str, Any]) -> None:
    """Refuses to verify a trainer whose training can't begin anew, twice.

    Args:
        trainer: Which streams.
        options: About streaming.
        tolerance: What its user allows.
        given: To `train`, by name.

    Raises:
        OptionError: Naming the first obstacle.
    """
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    begins = "Both runs begin where the constructor has ended."
    refused = {
        **{f"train({name}=...)": (bool(value), begins, "Verify the beginning.") for name, value in given.items()},
        "a trainer that has trained": (
            trainer.state.global_step > 0 or trainer.train_step is not None, begins, "Verify it before it trains."
        ),
        "a model that was compiled before the trainer was made": (
            trainer._is_given_compiled, "The stock run takes a plain model.", "Give the trainer the plain model."
        ),
        'megatrain_precision="bf16"': (
            options.compile.get("precision", "fp32") != "fp32" and tolerance is None,
            "It computes in another precision than the stock run.",
            'Verify with megatrain_precision="fp32", or give a tolerance.',
        ),
        "an optimizer with hooks on its step": (
            isinstance(optimizer, torch.optim.Optimizer) and has_hooks(optimizer),
            "Copies of an optimizer have no hooks.", "Leave them out, or use a callback.",
        ),
    }  # fmt: skip
    for what, (is_so, rule, way) in refused.items():
        if is_so:
            raise OptionError(f"verify can't repeat {what}.\n  {rule}\n  {way}")


def _referring_to_copies(value: Any, memo: Mapping[int, Any], known: dict[int, Any]) -> Any:
    """Returns a function or a method that has copies in its closure, where there are any; all else as it is.

    Args:
        value: An attribute of a module, or what a closure holds.
        memo: The copies, by the originals' ids.
        known: What was made of functions, by their ids; a function may be in its own closure.
    """
    if isinstance(value, nn.Module | torch.Tensor):
        return memo.get(id(value), value)
    if isinstance(value, types.MethodType):
        function = _referring_to_copies(value.__func__, memo, known)
        return types.MethodType(function, memo.get(id(value.__self__), value.__self__))
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    if id(value) not in known:
        cells = tuple(types.CellType() for _ in value.__closure__)
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        known[id(value)] = functools.update_wrapper(made, value)
        made.__kwdefaults__ = value.__kwdefaults__
        for cell, original in zip(cells, value.__closure__, strict=True):
            if _held(original) is not None:
                cell.cell_contents = _referring_to_copies(original.cell_contents, memo, known)
        if list(map(_held, cells)) == list(map(_held, value.__closure__)):
            known[id(value)] = value
    return known[id(value)]


def _held(cell: types.CellType) -> int | None:
    """The identity of what a closure's cell holds; None if it is empty."""
    try:
        return id(cell.cell_contents)
    except ValueError:
        return None


def _copy_of(name: str, value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, KeysView):  # a view of a dictionary, which knows no copying
        value = dict.fromkeys(value)
        return copy.deepcopy(value, memo).keys()
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:  # the copying of any class may raise anything
        raise OptionError(
            f"`{name}` of the trainer can't be copied ({type(error).__name__}: {error}).\n"
            "  verify trains copies of the trainer, which must see the same from the beginning.\n"
            "  Take what can begin anew: a data set in place of an iterator, a function that opens a file. Or give its "
            "class a __deepcopy__."
        ) from error


def _only_reports(callback: Any) -> bool:
    """Tells whether a callback shows or sends what others do, and changes nothing of the training."""
    is_librarys = type(callback).__module__.startswith(("transformers.integrations", "transformers.utils"))
    return is_librarys or isinstance(callback, PrinterCallback | ProgressCallback)


def other_models(trainer: Any) -> Iterator[CompiledModule]:
    """The compiled models of a trainer besides the one that it trains, such as a reference."""
    for value in vars(trainer).values():
        if isinstance(value, CompiledModule) and value is not trainer.model and value is not trainer.model_wrapped:
            yield value


class Untouched:
    """Models that must be as they were when copies are trained.

    Args:
        models: The trainer's own, and those that the copies share.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._models = models
        self._before = self._now()

    def check(self) -> None:
        """Looks whether anything was written.

        Raises:
            ExecuteError: Naming the first parameter or buffer.
        """
        now = self._now()
        for name, found in self._before.items():
            if now.get(name) != found:
                raise ExecuteError(
                    f"training a copy of the trainer has changed the trainer's own `{name}`.\n"
                    "  A function that refers to the model or the trainer itself (a loss, a collator) isn't copied "
                    "with them.\n"
                    "  Take the model from the function's arguments, and build the trainer anew."
                )

    def _now(self) -> dict[str, tuple[int, int, int]]:
        return {
            name if number == 0 else f"{name} of another model": found
            for number, model in enumerate(self._models)
            for name, found in _state_of(model)
        }


def _state_of(model: nn.Module) -> Iterator[tuple[str, tuple[int, int, int]]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, (id(tensor), tensor._version, id(tensor.grad))
