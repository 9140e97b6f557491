"""Faults of what stands around a training: trainers that stream, code that waits at its call, walks, files."""

from __future__ import annotations

from tests.mutants.fault import Fault

HERE, TOOLS = "tests/integrations/", "tests/tools/"
BITS = f"{HERE}test_trainer.py::test_a_trainer_that_streams_has_the_stock_runs_bits"

FAULTS: list[Fault] = [
    Fault(
        "losses of all but the last micro-batch aren't logged",
        "integrations/hf/streamed.py",
        "self._count_losses(losses[:-1])",
        "self._count_losses(losses[:0])",
        (f"{BITS}[accumulation, ragged]",),
    ),
    Fault(
        "a resumed trainer begins its rates anew",
        "integrations/hf/streamed.py",
        "folder, self.model, plain(self.optimizer), scheduler=self.lr_scheduler, **self",
        "folder, self.model, plain(self.optimizer), **self",
        (f"{HERE}test_resume.py::test_a_resumed_run_has_the_stock_runs_bits",),
    ),
    Fault(
        "a callback that reads gradients finds none",
        "integrations/hf/requirements.py",
        "if kind.on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step:",
        "if False:",
        (f"{BITS}[reads gradients]",),
    ),
    Fault(
        "another optimizer is never seen",
        "integrations/hf/one_step.py",
        "if self.step is not None and not is_same(self._made_for, self._settings()):",
        "if self.step is not None and not self._made_for:",
        (f"{HERE}test_refused.py::test_another_optimizer_or_clipping_gets_another_training_step",),
    ),
    Fault(
        "an update that runs once more forgets all micro-batches but the first",
        "integrations/hf/one_step.py",
        "return [each.code() for each in waiting]",
        "return [each.code() for each in waiting[:1]]",
        (f"{BITS}[calls again]",),
    ),
    Fault(
        "updates that aren't training steps leave masters as they were",
        "integrations/hf/one_step.py",
        'if compiled.options.precision == "fp32":',
        'if compiled.options.precision != "none":',
        (f"{HERE}test_resume.py::test_masters_are_updated_where_an_update_is_no_training_step",),
    ),
    Fault(
        "parts of the model that are called by themselves train it on the host",
        "integrations/hf/whole_calls.py",
        "if known is None or known[0] is not gradient or known[1] != version:",
        "if known is not None and known[1] > version:",
        (f"{HERE}test_refused.py::test_parts_of_the_model_that_are_called_by_themselves_are_refused",),
    ),
    Fault(
        "a model in the streaming one's place trains without megatrain",
        "integrations/hf/whole_calls.py",
        "if model is not compiled and all(module is not compiled for module in model.modules()):",
        "if model is None:",
        (f"{HERE}test_refused.py::test_a_model_that_takes_the_place_of_the_streaming_one_is_refused",),
    ),
    Fault(
        "the oldest checkpoint is gone on from",
        "integrations/hf/newest_whole.py",
        "key=_number_of, reverse=True)",
        "key=_number_of)",
        (f"{HERE}test_resume.py::test_the_newest_whole_checkpoint_is_taken",),
    ),
    Fault(
        "losses of several processes count in full on each",
        "integrations/hf/code_losses.py",
        "return paused.give(result) / self._several.size",
        "return paused.give(result)",
        (f"{HERE}test_several.py::test_two_processes_train_and_evaluate_as_the_stock_run_does",),
    ),
    Fault(
        "a call without gradients waits for a training step",
        "integrations/paused.py",
        "elif not torch.is_grad_enabled():",
        "elif compiled is None:",
        (f"{HERE}test_paused.py::test_code_waits_where_it_calls_the_model_and_goes_on_with_the_result",),
    ),
    Fault(
        "code asks for gradients through the model, and finds none",
        "integrations/paused.py",
        "if any(gradient is None for gradient in found):",
        "if not found:",
        (f"{HERE}test_paused.py::test_code_that_asks_for_gradients_through_the_model_is_told_and_can_be_ended",),
    ),
    Fault(
        "a buffer that generating writes isn't the model's",
        "runtime/on_demand.py",
        "return self.tensor._version != self._version",
        "return self.tensor._version < self._version",
        (f"{TOOLS}test_generate.py::test_buffers_that_a_walk_writes_are_the_models",),
    ),
    Fault(
        "a compiled model is pickled with its schedule",
        "training/compiled/module.py",
        "return operator.getitem, ((self.__original__,), 0)",
        "return super().__reduce_ex__(protocol)",
        (f"{TOOLS}test_compiled_module.py::test_copies_and_pickles_are_those_of_the_plain_model",),
    ),
]
