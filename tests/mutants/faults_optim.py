"""Faults of optimizers' updates, masters and norms."""

from __future__ import annotations

from tests.mutants.fault import Fault

BLOCKWISE, MASTERS, NORM = "tests/optim/test_blockwise.py", "tests/optim/test_masters.py", "tests/optim/test_norm.py"
PATHS, REGISTRY, NARROW, PREPARED = (
    f"tests/optim/test_{name}.py" for name in ("fast_paths", "registry", "narrow", "prepared")
)

CODES = "tests/optim/test_adamw_8bit.py"
_UPDATES = f"{CODES}::test_updates_are_the_references_whoever_computes_them"

OFFLOAD = "tests/training/test_offload.py"

FAULTS: list[Fault] = [
    Fault(
        "state that an update has changed in its buffer isn't written to the file",
        "optim/moments.py",
        "        if block in self._changed:\n            self.file.write(",
        "        if block in self._changed and not block:\n            self.file.write(",
        (f"{OFFLOAD}::test_steps_have_the_bits_of_state_in_memory",),
    ),
    Fault(
        "an update that is completed late finds in the buffer what another block has left",
        "optim/moments.py",
        "        if not is_there:\n",
        "        if not is_there and block not in self._views:\n",
        (f"{OFFLOAD}::test_state_is_seen_and_written_between_steps",),
    ),
    Fault(
        "state that user code has dropped comes back from the file",
        "optim/moments.py",
        "                    view.zero_()\n",
        "                    view.add_(0)\n",
        (f"{OFFLOAD}::test_state_is_seen_and_written_between_steps",),
    ),
    Fault(
        "state that the host has room for is left in the file",
        "optim/moments.py",
        "for name, value in mapped.items() if state.get(name) is value})",
        "for name, value in mapped.items() if state.get(name) is mapped})",
        (f"{OFFLOAD}::test_state_that_has_room_stays_in_memory",),
    ),
    Fault(
        "a plan counts state as in the file that stays in memory",
        "planning/host_plan.py",
        "moments.of_keys(filed_state(programs[0], schedule.known_workload(), moments.sizes))",
        "moments.of_keys(moments.sizes)",
        ("tests/planning/test_moments.py::test_only_state_that_the_host_has_no_room_for_is_in_the_file",),
    ),
    Fault(
        "the file of optimizer state keeps its name",
        "files/scratch_file.py",
        "                os.unlink(path)\n",
        "                os.stat(path)\n",
        (f"{OFFLOAD}::test_steps_have_the_bits_of_state_in_memory",),
    ),
    Fault(
        "a forked process writes into the file of the first",
        "files/scratch_file.py",
        "        if os.getpid() != self._process:\n            raise",
        "        if os.getpid() == -self._process:\n            raise",
        (f"{OFFLOAD}::test_updates_that_are_due_in_a_forked_process_are_refused_and_leave_the_file_alone",),
    ),
    Fault(
        "a plan lacks the buffers of optimizer state that is in a file",
        "planning/host_plan.py",
        "sum(buffer_bytes(schedule).values())",
        "max(buffer_bytes(schedule).values(), default=0)",
        ("tests/planning/test_moments.py::test_the_host_has_the_state_of_two_blocks_and_the_disk_moves_all",),
    ),
    Fault(
        "what a hook of an optimizer's step makes of gradients is lost",
        "optim/updates.py",
        "        if has_hooks:\n            self._source.using.take_shown()\n",
        "        if has_hooks:\n            self._source.using.hide()\n",
        ("tests/training/test_user_code.py::test_user_code_has_eagers_results_or_is_refused_by_name",),
    ),
    Fault(
        "where there is no compiler, codes stand for the lower end of their interval",
        "optim/fast/codes.py",
        "square.float().add_(0.5)",
        "square.float().add_(0.0)",
        (_UPDATES,),
    ),
    Fault(
        "in C a code of 8 bits is rounded toward zero",
        "base/native/adamw_8bit.c",
        "(uint8_t)as_bits(value + 0x1.8p23f)",
        "(uint8_t)(int8_t)(int32_t)value",
        (f"{CODES}::test_both_ways_are_tried_here",),
    ),
    Fault(
        "a checkpoint of exact moments is rounded to 8 bits in silence",
        "files/optimizers.py",
        "if each.here == _class_of(optimizer) and any(",
        "if each.here == _class_of(optimizer) and not any(",
        (f"{CODES}::test_a_checkpoint_goes_on_to_the_bit_and_exact_moments_are_told",),
    ),
    Fault(
        "parameters that are in no block are never updated",
        "optim/blockwise.py",
        "        elif rest:\n",
        "        elif rest and not self._has_rest:\n",
        (f"{BLOCKWISE}::test_steps_leave_the_same_bits_in_any_order",),
    ),
    Fault(
        "a parameter of two blocks is updated with both",
        "optim/blockwise.py",
        "            self._blocks.append(set(block) - seen)\n",
        "            self._blocks.append(set(block))\n",
        (f"{BLOCKWISE}::test_steps_leave_the_same_bits_in_any_order",),
    ),
    Fault(
        "what a step counts in attributes and groups is lost",
        "optim/blockwise.py",
        "        if not self.is_at_once:\n            self._step.commit()\n",
        "        pass\n",
        (f"{BLOCKWISE}::test_steps_leave_the_same_bits_in_any_order",),
    ),
    Fault(
        "clipping is applied twice",
        "optim/block_update.py",
        "copy=True).mul_(scale)\n",
        "copy=True).mul_(scale * scale)\n",
        (f"{MASTERS}::test_clipped_steps_block_by_block_leave_the_bits_of_fp32",),
    ),
    Fault(
        "clipping turns the gradient of a parameter without a master around",
        "optim/block_update.py",
        "gradient if scale == 1.0 else gradient * scale\n",
        "gradient if scale == 1.0 else gradient * -scale\n",
        (f"{MASTERS}::test_clipped_steps_block_by_block_leave_the_bits_of_fp32",),
    ),
    Fault(
        "halves are rounded toward zero",
        "optim/masters/halves.py",
        "        torch.add(bits, 0x8000, out=spare)\n",
        "        torch.add(bits, 0, out=spare)\n",
        (f"{MASTERS}::test_the_high_half_is_torchs_rounding_but_for_exact_ties",),
    ),
    Fault(
        "stochastic rounding draws a bit too few, and is biased",
        "optim/masters/halves.py",
        "spare.random_(0, 1 << 16, generator",
        "spare.random_(0, 1 << 15, generator",
        (f"{MASTERS}::test_stochastic_rounding_is_unbiased_and_seeded",),
    ),
    Fault(
        "an update isn't counted as a write",
        "optim/block_update.py",
        "            increment_version(parameter)\n",
        "            pass\n",
        (f"{REGISTRY}::test_others_see_an_update",),
    ),
    Fault(
        "the norm adds up gradients in the order in which they came",
        "optim/norm.py",
        "for place in sorted(self._norms)]",
        "for place in self._norms]",
        (f"{NORM}::test_norm_and_clipped_gradients_have_torchs_bits_in_any_order",),
    ),
    Fault(
        "a norm that overflows counts as a gradient that isn't finite",
        "optim/norm.py",
        "not math.isfinite(norm.item()) and not _is_finite(gradient):",
        "not math.isfinite(norm.item()):",
        (f"{NORM}::test_without_gradients_the_norm_is_zero_and_one_that_overflows_is_no_element_that_is_not_finite",),
    ),
    Fault(
        "a prepared update writes into a moment that the user replaced",
        "optim/prepared.py",
        "        if not all(map(is_, found, [ref() for ref in self._state])):\n            return None\n",
        "        found = [ref() for ref in self._state]\n",
        (f"{PREPARED}::test_prepared_updates_leave_what_updates_made_anew_leave",),
    ),
    Fault(
        "a prepared update doesn't see that other code wrote a parameter",
        "optim/masters/registry.py",
        "if mark[0] != parameter._version or mark[1] != parameter.data_ptr():",
        "if mark[1] != parameter.data_ptr():",
        (f"{PREPARED}::test_prepared_updates_leave_what_updates_made_anew_leave",),
    ),
    Fault(
        "a prepared update reads a gradient in the dtype of an earlier one",
        "optim/prepared.py",
        "[form_of(gradient) for gradient in given] != self._forms",
        "[form_of(gradient)[1:] for gradient in given] != [form[1:] for form in self._forms]",
        (f"{PREPARED}::test_prepared_updates_leave_what_updates_made_anew_leave",),
    ),
    Fault(
        "what is copied to undo an update isn't planned",
        "optim/need.py",
        "            undo = max(undo, copied)\n",
        "            undo = min(undo, copied)\n",
        (f"{PATHS}::test_what_is_kept_to_undo_an_update_counts_where_one_may_fail",),
    ),
]
