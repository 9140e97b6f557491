"""Faults of schedules, of their checker, and of the streams that run them."""

from __future__ import annotations

from tests.mutants.fault import Fault

_CHECK = "tests/scheduler/test_check.py::"
_EVICTIONS = "tests/scheduler/test_evictions.py::"
_ORDERS = "tests/simulated_runs/test_orders.py::"
_THERE = "tests/scheduler/test_device_updates.py::"
_RECORDED = "test_recorded_kernels_have_the_bits_of_a_loop_in_any_order_of_the_streams"

FAULTS: list[Fault] = [
    Fault(
        "all optimizer state is in the file where the host lacks room for a part of it",
        "scheduler/builder/moments.py",
        "        if spared_bytes(fewer) >= least:\n",
        "        if spared_bytes(fewer) >= sum(sizes.values()):\n",
        ("tests/planning/test_moments.py::test_only_state_that_the_host_has_no_room_for_is_in_the_file",),
    ),
    Fault(
        "optimizer state is written to its file before its update is over",
        "scheduler/effects.py",
        'lambda s, b, _: Effect((Item("moments", b),), moves',
        "lambda s, b, _: Effect((), moves",
        (
            "tests/scheduler/test_moments.py::test_a_step_with_moments_in_a_file_has_its_ops_in_their_order_and_those_of_the_disk",
        ),
    ),
    Fault(
        "the checker lets a buffer be filled whose state isn't written",
        "scheduler/check/host_rules.py",
        "            if op.slot in held:\n",
        "            if op.slot in held and op.slot > 1:\n",
        ("tests/scheduler/test_moments.py::test_a_buffer_that_is_not_written_yet_is_not_filled",),
    ),
    Fault(
        "parked values are written to a file before they have left the device",
        "scheduler/effects.py",
        'Effect((Item("parked", block, micro_batch),), (Item("evicted"',
        'Effect((), (Item("evicted"',
        (f"{_EVICTIONS}test_any_part_of_what_is_parked_may_be_in_a_file_whatever_runs_first",),
    ),
    Fault(
        "parked values leave into a buffer whose chunk isn't written yet",
        "scheduler/dependency.py",
        'return item if slot is None else Item("buffer", slot), 0, 1',
        "return item, 0, 1",
        (f"{_EVICTIONS}test_any_part_of_what_is_parked_may_be_in_a_file_whatever_runs_first",),
    ),
    Fault(
        "the checker lets a buffer be filled whose chunk hasn't left",
        "scheduler/check/host_rules.py",
        '            case.require_before(left, filled, "fills a buffer that is emptied by", rule)\n',
        "            pass\n",
        (f"{_EVICTIONS}test_a_table_whose_chunks_do_not_pass_one_by_one_is_refused",),
    ),
    Fault(
        "the checker lets a chunk be read from a file before it is written",
        "scheduler/check/host_rules.py",
        '            case.require_before(written, read, "reads what is written by", rule)\n',
        "",
        (f"{_EVICTIONS}test_a_table_whose_chunks_do_not_pass_one_by_one_is_refused",),
    ),
    Fault(
        "what an optimizer keeps on the device has no bytes of its own",
        "scheduler/builder/stays.py",
        "            nbytes += workload.blocks[block].optimizer_bytes if block in device_updates else 0\n",
        "",
        (f"{_THERE}test_any_blocks_may_be_updated_there_and_neither_their_weights_nor_gradients_cross",),
    ),
    Fault(
        "the checker lets the device update a block before its last backward",
        "scheduler/check/host_rules.py",
        '            case.require_before(reader, update, "writes what is read by", rule)\n        for norm in',
        "            pass\n        for norm in",
        (f"{_THERE}test_every_other_table_is_refused_or_harmless_and_all_other_instructions_are_refused",),
    ),
    Fault(
        "the device updates a block before the norm is known",
        "scheduler/effects.py",
        '    norm = [Item("norm", NO_BLOCK)] * step.kind.clip\n',
        "    norm = list[Item]()\n",
        (f"{_THERE}test_any_blocks_may_be_updated_there_and_neither_their_weights_nor_gradients_cross",),
    ),
    Fault(
        "the checker lets the device update a block before the norm is known",
        "scheduler/check/host_rules.py",
        'case.require_before(norm, update, "is scaled by", rule)\n\n\ndef check_updates',
        "pass\n\n\ndef check_updates",
        (f"{_THERE}test_an_update_there_that_does_not_follow_the_norm_is_refused",),
    ),
    Fault(
        "no op waits for memory that another stream releases",
        "scheduler/dependency.py",
        '    yield from _memory_edges(books, "device")\n',
        "",
        (f"{_CHECK}test_every_built_schedule_is_accepted_and_does_no_harm_in_any_order",),
    ),
    Fault(
        "gradients overtake the updates that use those before them",
        "scheduler/dependency.py",
        '    yield from _memory_edges(books, "landing")\n',
        "",
        (f"{_CHECK}test_gradients_that_run_ahead_of_updates_are_refused_and_do_harm",),
    ),
    Fault(
        "weights may overwrite the beginning of others that are read",
        "scheduler/dependency.py",
        "if low < stop and start < high]",
        "if low <= start and start < high]",
        (
            "tests/scheduler/test_build.py::test_weights_take_as_many_slots_as_there_are_and_no_more_bytes_than_they_need",
        ),
    ),
    Fault(
        "the checker misses a weight that is overwritten while it is in use",
        "scheduler/check/memory_rules.py",
        "if a < start + nbytes and start < b]",
        "if a < start and start < b]",
        (f"{_CHECK}test_a_weight_overwritten_while_in_use_is_shown_with_its_row",),
    ),
    Fault(
        "parked values count for one micro-batch",
        "scheduler/table.py",
        "return table.kind.micro_batches * sum(aligned(",
        "return sum(aligned(",
        ("tests/scheduler/test_build.py::test_keep_retains_all_graphs_and_offload_parks_all_inputs_but_the_last",),
    ),
    Fault(
        "one value fewer is parked than was chosen",
        "scheduler/effects.py",
        "if block > last or producer in saved",
        "if block >= last or producer in saved",
        ("tests/scheduler/test_text.py::test_printed_forms",),
    ),
    Fault(
        "a merged storage has the bytes of the last capture, not of the largest",
        "scheduler/from_program.py",
        "self.nbytes[storage] = max(self.nbytes[storage], nbytes)",
        "self.nbytes[storage] = nbytes",
        ("tests/scheduler/test_merged.py::test_a_merged_workload_has_the_largest_of_each_size_and_one_structure",),
    ),
    Fault(
        "a buffer may be written one block after it is read",
        "scheduler/from_program.py",
        "(first >= producer and old not in returned)",
        "(first + 1 >= producer and old not in returned)",
        ("tests/scheduler/test_buffers.py::test_refused_is_exactly_what_the_table_would_get_wrong",),
    ),
    Fault(
        "instructions release nothing before an op",
        "scheduler/instructions.py",
        "frees_before=tuple(frees.before[position]),",
        "frees_before=(),",
        (
            "tests/scheduler/test_instructions.py::"
            "test_instructions_of_every_schedule_pass_their_check_and_every_other_is_refused",
        ),
    ),
    Fault(
        "buffers are read on the host before they have come",
        "runtime/stores/offload_buffers.py",
        "            self._device.synchronize()\n            for (buffer",
        "            for (buffer",
        (
            "tests/simulated_runs/test_host.py::"
            "test_calls_and_steps_write_buffers_with_one_wait_in_any_order_of_the_streams",
        ),
        on_device=True,
    ),
    Fault(
        "streams of the device don't wait for each other",
        "runtime/streams/stream.py",
        "            self.device_stream.wait_event(mark)",
        "            pass",
        (f"{_ORDERS}{_RECORDED}",),
        on_device=True,
    ),
    Fault(
        "a step doesn't follow the step before on another stream",
        "runtime/streams/stream_set.py",
        "                compute.wait_event(self._end_of_latest)",
        "                pass",
        (
            "tests/simulated_runs/test_host.py::"
            "test_the_host_may_write_weights_after_calls_on_streams_that_it_has_not_ordered",
        ),
        on_device=True,
    ),
]
