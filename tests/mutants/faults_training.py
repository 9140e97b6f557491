"""Faults of training steps: when updates run, what failures leave, what checkpoints lack."""

from __future__ import annotations

from tests.mutants.fault import Fault

_THERE = "tests/simulated_runs/test_device_updates.py::"

FAULTS: list[Fault] = [
    Fault(
        "a look at weights that the device has updated finds the values of before",
        "training/device_updates.py",
        "            for each in block.parameters if block.is_ahead else ():\n",
        "            for each in block.parameters if not block.is_ahead else ():\n",
        (f"{_THERE}test_looks_writes_calls_other_batches_freezing_and_checkpoints_change_nothing",),
        on_device=True,
    ),
    Fault(
        "a write into moments that the device has updated is lost in silence",
        "training/device_updates.py",
        "        if is_written:\n",
        "        if False:\n",
        (f"{_THERE}test_a_write_through_an_older_view_is_told_and_lost",),
        on_device=True,
    ),
    Fault(
        "the device updates with gradients that aren't clipped",
        "training/device_updates.py",
        "self._kernel(each.there, flat, step, own, updates.scale)",
        "self._kernel(each.there, flat, step, own, 1.0)",
        (f"{_THERE}test_steps_have_the_bits_of_the_hosts_updates_in_any_order",),
        on_device=True,
    ),
    Fault(
        "the norm of all gradients lacks those that stay on the device",
        "training/trainer.py",
        "        self._updates.take_squares_there(self._parameters[key], gradient, norm)\n",
        "        pass\n",
        (f"{_THERE}test_steps_have_the_bits_of_the_hosts_updates_in_any_order",),
        on_device=True,
    ),
    Fault(
        "what is frozen of a block that the device updates is stale after a write",
        "runtime/stores/slots.py",
        "stays=not has_frozen or self._has_frozen(block, where))",
        "stays=True)",
        (f"{_THERE}test_what_is_frozen_of_a_block_stays_there_until_somebody_writes_it",),
        on_device=True,
    ),
    Fault(
        "updates overlap a backward that a hook may end",
        "training/update_times.py",
        "waits=in_turn or waits",
        "waits=in_turn",
        ("tests/training/test_failures.py::test_updates_wait_for_the_last_gradient_where_a_hook_may_end_the_backward",),
    ),
    Fault(
        "a loss's own parameter is left to the next step, whose loss reads it",
        "training/update_times.py",
        "not (reports_norm or self._holds_others())",
        "not reports_norm",
        ("tests/training/test_several_optimizers.py::test_an_optimizer_may_hold_only_a_parameter_outside_the_model",),
    ),
    Fault(
        "an optimizer isn't marked while updates are due: its state is the one before",
        "training/completion.py",
        "            self._mark(optimizer, _DueOptimizer, type(optimizer).__name__)",
        "            pass",
        ("tests/training/test_due_updates.py::test_every_look_sees_the_updates",),
    ),
    Fault(
        "a capture reads parameters whose updates are still due",
        "training/setup.py",
        "before_capture=self.catch_up)",
        "before_capture=lambda: None)",
        ("tests/training/test_step.py::test_a_capture_comes_after_the_updates_that_are_due",),
    ),
    Fault(
        "a factor on the device is rounded to the loss's dtype before the product",
        "training/batch.py",
        "dtype = torch.promote_types(loss.dtype, torch.float32)",
        "dtype = loss.dtype",
        ("tests/training/test_micro_batches.py::test_factors_that_stay_on_the_device_have_the_bits_of_numbers",),
    ),
    Fault(
        "a step that leaves no trace leaves the generators",
        "training/step_run.py",
        "                before.restore(run.device)\n",
        "",
        ("tests/training/test_failures.py::test_an_error_once_in_the_users_code_leaves_no_trace",),
    ),
    Fault(
        "a skipped step updates after all",
        "training/step_run.py",
        "        if running.is_skipped:\n            self._skip(updates)\n        elif not running.has_begun:",
        "        if running.is_skipped:\n            self._skip(updates)\n        if not running.has_begun:",
        ("tests/training/test_norm.py::test_skipped_steps_are_those_of_a_loop_that_skips_them",),
    ),
    Fault(
        "finite gradients whose norm overflows count as not finite",
        "optim/norm.py",
        "not math.isfinite(norm.item()) and not _is_finite(gradient)",
        "not math.isfinite(norm.item())",
        ("tests/training/test_norm.py::test_a_norm_that_overflows_goes_where_eager_lets_it_go",),
    ),
    Fault(
        "low halves of masters don't come back from a checkpoint",
        "training/saved_step.py",
        "    compiled.masters.restore(masters)  # after",
        "    # after",
        ("tests/training/test_save.py::test_a_run_goes_on_to_the_bit",),
    ),
    Fault(
        "generators don't come back from a checkpoint",
        "training/saved_step.py",
        "    saving.restore_generators(generators, compiled.options.device)\n",
        "",
        ("tests/training/test_save.py::test_a_run_goes_on_to_the_bit",),
    ),
    Fault(
        "frozen weights on the device are stale after a write that torch doesn't count",
        "runtime/stores/slots.py",
        "return stamp == self.stamp and not self._sampled.look(self._samples)()",
        "return stamp == self.stamp",
        (
            "tests/training/test_persistent.py::test_a_frozen_weight_that_the_user_changes_is_the_new_one_in_the_next_step",
        ),
    ),
    Fault(
        "the memory of the loss isn't in the schedule's figure",
        "planning/loss_bytes.py",
        "    return max(0, live.peak - made)",
        "    return 0",
        ("tests/training/test_loss.py::test_the_term_is_what_the_loss_takes",),
    ),
]
