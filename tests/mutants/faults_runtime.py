"""Faults of captures, of calls and their backwards, of stores and of files of weights."""

from __future__ import annotations

from tests.mutants.fault import Fault

FAULTS: list[Fault] = [
    Fault(
        name="memory that a user gives to a parameter isn't taken in",
        path="runtime/stores/host_store.py",
        old="        if changed:\n            check_unshared(",
        new="        if not changed:\n            check_unshared(",
        seen_by=("tests/training/test_due_updates.py::test_every_write_comes_after_the_updates",),
    ),
    Fault(
        name="an operation of the executor doesn't wait for what its schedule names first",
        path="runtime/operations.py",
        old="        waits, op = list(instruction.waits), instruction.op\n",
        new="        waits, op = list(instruction.waits)[1:], instruction.op\n",
        seen_by=("tests/runtime/test_schedule_is_what_runs.py::test_issue_order_and_waits_equal_the_schedule",),
    ),
    Fault(
        name="the sum so far of a value's gradient is added twice",
        path="runtime/operations.py",
        old='                call.drop("gradient", name)  # the sum so far is part of the new one\n'
        "                call.set_gradient(name, gradient)\n",
        new="                call.add_gradient(name, gradient)\n",
        seen_by=("tests/runtime/test_backwards.py::test_optimizer_in_the_backward",),
    ),
    Fault(
        name="a second backward draws other random numbers than the forward",
        path="runtime/operations.py",
        old="        with call.loaded.runners[block.index].repeated(call.rng.get(block.index)):\n",
        new="        with call.loaded.runners[block.index].repeated(None):\n",
        seen_by=("tests/runtime/test_backwards.py::test_backward_into_some_leaves_only",),
    ),
    Fault(
        name="buffers that a forward wrote don't reach the model",
        path="runtime/call.py",
        old="        if self._home is None:\n            engine.bind_anew",
        new="        if self._home is not None:\n            engine.bind_anew",
        seen_by=("tests/runtime/test_tensors.py::test_unusual_tensors_in_one_model",),
    ),
    Fault(
        name="a call that is over keeps what it held",
        path="runtime/call.py",
        old="            for name in list(registry):\n",
        new='            for name in list(registry) if kind != "value" else ():\n',
        seen_by=("tests/runtime/test_backwards.py::test_what_a_repeat_needs_is_let_go_of_with_the_last_output",),
    ),
    Fault(
        name="a write between forward and backward passes unseen",
        path="runtime/call.py",
        old="            if version(tensor) != before:\n",
        new="            if version(tensor) < before:\n",
        seen_by=("tests/runtime/test_calls.py::test_writing_where_it_would_matter_is_refused_or_right",),
    ),
    Fault(
        name="the second of several gradients in a slab overwrites the first",
        path="runtime/gradients.py",
        old="                offset += aligned(gradient.nbytes)\n",
        new="                offset += 0\n",
        seen_by=(
            "tests/runtime/test_gradients.py::test_whatever_the_user_does_with_gradients_they_are_those_of_eager",
        ),
    ),
    Fault(
        name="a gradient is added into memory that somebody else holds",
        path="runtime/gradients.py",
        old="            is_own = not is_shared and storage.data_ptr() not in seen",
        new="            is_own = storage.data_ptr() not in seen",
        seen_by=(
            "tests/runtime/test_gradients.py::test_a_sum_takes_the_memory_of_its_first_term_and_leaves_what_others_hold",
        ),
    ),
    Fault(
        name="a buffer of a ring is filled while the device still reads it",
        path="device/bus.py",
        old="        end = self._ends[0]\n",
        new="        end = None\n",
        seen_by=("tests/runtime/test_locked_memory.py::test_what_passed_through_a_ring_may_be_overwritten_at_once",),
    ),
    Fault(
        name="after a failure, activations that a file has stay there",
        path="runtime/operations.py",
        old='op.stream == Stream.HOST or op.what in ("R", "K"))',
        new="op.stream in (Stream.HOST, Stream.DISK))",
        seen_by=("tests/training/test_evictions.py::test_a_failure_of_an_operation_loses_nothing",),
    ),
    Fault(
        name="activations that return come from the buffer through which they left",
        path="runtime/stores/offload_buffers.py",
        old="        if (name, start) not in self._places:",
        new="        start = next((begin for known, begin in self._places if known == name), start)\n"
        "        if (name, start) not in self._places:",
        seen_by=("tests/training/test_evictions.py::test_steps_with_activations_in_a_file_have_eagers_bits",),
    ),
    Fault(
        name="buffers that cross in groups come back one byte further",
        path="runtime/stores/offload_buffers.py",
        old="                start = end\n",
        new="                start = end - (end > 64)\n",
        seen_by=("tests/runtime/test_stores.py::test_what_comes_back_is_what_went_there",),
    ),
    Fault(
        name="the second piece of a tensor is read from where the first begins",
        path="files/weight_files.py",
        old="            start += values.nbytes\n",
        new="            start += values.nbytes - values.element_size()\n",
        seen_by=("tests/runtime/test_weight_files.py::test_values_are_those_of_load_state_dict",),
    ),
    Fault(
        name="a number that turns into another type leaves the old graph in use",
        path="tracer/spec.py",
        old="    if type(left) is not type(right) or isinstance(left, torch.Tensor):\n",
        new="    if isinstance(left, torch.Tensor):\n",
        seen_by=("tests/runtime/test_stale.py::test_values_that_a_forward_can_tell_apart_are_not_the_same",),
    ),
    Fault(
        name="the last value that a forward read from its inputs isn't compared",
        path="tracer/guards.py",
        old="            for nodes, guard in self._steps:\n",
        new="            for nodes, guard in self._steps[:-1]:\n",
        seen_by=("tests/tracer/test_guards.py::test_a_slice_up_to_a_tensor_is_guarded_by_its_value",),
    ),
    Fault(
        name="a second backward of a call goes on where the first has ended",
        path="runtime/executor.py",
        old="            running = call if call.status == OPEN else self._replay(start)\n",
        new="            running = call\n",
        seen_by=("tests/runtime/test_random_backwards.py::test_random_callers",),
    ),
    Fault(
        name="memory of slots goes back while another stream reads it",
        path="runtime/engine.py",
        old="            self.streams.settle()\n        if needs_room:\n",
        new="            pass\n        if needs_room:\n",
        seen_by=("tests/simulated_runs/test_dropped_synchronizations.py::test_each_place_of_the_source_is_listed",),
        on_device=True,
    ),
    Fault(
        name="the device takes the norm of a gradient to which the host adds another block's",
        path="runtime/gradients.py",
        old="whole_norms(keys, gradients, set(completes) - partial)",
        new="whole_norms(keys, gradients, keys)",
        seen_by=("tests/gpu/test_train_step.py::test_the_device_takes_the_norms_of_gradients_that_are_whole_there",),
        on_device=True,
    ),
    Fault(
        name="the norm is that of a gradient before its hooks",
        path="training/trainer.py",
        old="            norm = None  # of the gradient before its hooks\n",
        new="            pass\n",
        seen_by=("tests/gpu/test_train_step.py::test_the_device_takes_the_norms_of_gradients_that_are_whole_there",),
        on_device=True,
    ),
    Fault(
        name="a result of recorded kernels isn't copied to memory of its own",
        path="runtime/replays.py",
        old="        if copied:\n",
        new="        if not copied:\n",
        seen_by=("tests/gpu/test_replays.py::test_calls_have_eagers_bits",),
        on_device=True,
    ),
]
