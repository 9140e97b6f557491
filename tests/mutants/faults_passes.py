"""Faults of passes: templates shared too far, results kept too long, rewrites that forget memory or modes."""

from __future__ import annotations

from tests.mutants.fault import Fault

SHARING, REWRITE, SPLIT = (f"tests/passes/test_{name}.py" for name in ("sharing", "rewrite", "split_tables"))

HEADS = "tests/rewrites/test_head_loss.py"

FAULTS: list[Fault] = [
    Fault(
        "a call that a pass adds runs with gradients where the one that it is like doesn't",
        "passes/rewriter.py",
        "source=site.source, grad=site.grad,",
        "source=site.source, grad=True,",
        (f"{REWRITE}::test_modes_are_those_of_the_call_it_is_like",),
    ),
    Fault(
        "layers that differ in the sign of a zero share a template",
        "passes/canonicalize.py",
        "repr(value) if isinstance(value, float) else value)",
        "value)",
        (f"{SHARING}::test_layers_that_differ_in_code_have_their_own_templates",),
    ),
    Fault(
        "layers that differ in their grad mode share a template",
        "passes/canonicalize.py",
        '                meta.get("grad"),\n',
        "",
        (f"{SHARING}::test_layers_that_differ_in_code_have_their_own_templates",),
    ),
    Fault(
        "layers that differ in arguments given by place share a template",
        "passes/canonicalize.py",
        "                frozen(node.args, number),\n",
        "",
        (f"{SHARING}::test_layers_that_differ_in_code_have_their_own_templates",),
    ),
    Fault(
        "a block that writes into its input writes into another block's result",
        "passes/partition.py",
        "        if node in written:\n            copies[node] = _clone_of",
        "        if node in ():\n            copies[node] = _clone_of",
        ("tests/passes/test_partition.py::test_a_block_that_writes_into_its_input_works_on_a_copy",),
    ),
    Fault(
        "a view of weights leaves its block, whose slot is overwritten",
        "passes/partition.py",
        '            if node.meta["storage"] in self._state_storages:\n',
        '            if node.meta["storage"] is None:\n',
        ("tests/passes/test_partition.py::test_a_view_of_a_parameter_leaves_its_block_as_a_copy",),
    ),
    Fault(
        "a graph runs under the caller's autocast",
        "passes/interpret.py",
        "stack.enter_context(torch.autocast(kind, enabled=False))",
        "stack.enter_context(torch.autocast(kind, enabled=True))",
        ("tests/passes/test_interpret.py::test_recorded_modes_count_and_not_the_callers",),
    ),
    Fault(
        "a call that needs a gradient gets the outcome of one that doesn't",
        "passes/rewriter.py",
        'kinds = tuple((node.meta["spec"], node.meta["requires_grad"]) for node in number)',
        'kinds = tuple(node.meta["spec"] for node in number)',
        (f"{REWRITE}::test_calls_that_are_alike_are_tried_once_and_get_what_their_own_trial_would_give",),
    ),
    Fault(
        "writes into a replaced tensor are forgotten",
        "passes/rewriter.py",
        "tuple(new if w is old else w for w in",
        "tuple(w for w in",
        (f"{REWRITE}::test_what_replaces_a_call_takes_its_name_its_views_and_the_writes_into_it",),
    ),
    Fault(
        "views of a replaced tensor stay views of the old one",
        "passes/rewriter.py",
        'view.meta.update(storage=new.meta["storage"], storage_bytes=new.meta["storage_bytes"])',
        "pass",
        (f"{REWRITE}::test_what_replaces_a_call_takes_its_name_its_views_and_the_writes_into_it",),
    ),
    Fault(
        "operands with a row for each expert aren't cut with the experts",
        "passes/split/rows.py",
        "        if len(shape) >= -from_right and shape[from_right] != 1:\n",
        "        if len(shape) >= -from_right and shape[from_right] == 1:\n",
        ("tests/passes/test_split_experts.py",),
    ),
    Fault(
        "marks of one chunk of logits stay in the gradient of the next",
        "passes/rewrites/chunked_log_probs.py",
        "gradients.scatter_(1, places, 0.0)",
        "gradients.scatter_(1, places, 1.0)",
        (f"{HEADS}::test_chunks_of_any_head_are_right_and_keep_the_bits_of_loss_and_hidden_gradients",),
    ),
    Fault(
        "ignored rows are smoothed",
        "passes/rewrites/head_loss.py",
        "smooth = (-sums).masked_fill(is_ignored, 0)",
        "smooth = (-sums)",
        (f"{HEADS}::test_chunks_of_any_head_are_right_and_keep_the_bits_of_loss_and_hidden_gradients",),
    ),
    Fault(
        "gradients of parts are summed in the dtype of the weight",
        "passes/rewrites/parts.py",
        "dtype=torch.promote_types(tensor.dtype, torch.float32)",
        "dtype=tensor.dtype",
        (f"{HEADS}::test_sums_over_chunks_are_rounded_once",),
    ),
    Fault(
        "kernels of parts that are left out don't count",
        "passes/interpret.py",
        "self.repeats = number",
        "self.repeats = 1",
        ("tests/passes/test_alike_parts.py",),
    ),
    Fault(
        "values of a linear layer that a backward reads aren't computed",
        "passes/rewrites/tiled_region.py",
        'return any(user.op != "output" and',
        'return any(user.op == "nothing" and',
        ("tests/rewrites/test_tile_tokens.py::test_values_that_a_backward_reads_are_computed",),
    ),
    Fault(
        "a flip of the text treats each token alone",
        "passes/rewrites/token_rules.py",
        'if axis in call.dims("dims" if',
        'if axis < 0 and call.dims("dims" if',
        ("tests/rewrites/test_tile_tokens.py::test_what_mixes_tokens_is_left_out",),
    ),
    Fault(
        "positions that their dtype doesn't hold are known",
        "passes/rewrites/positions.py",
        "    is_exact = bool(",
        "    is_exact = True or bool(",
        ("tests/rewrites/test_positions.py::test_other_masks_are_told_apart",),
    ),
    Fault(
        "a view of every other element is one of all",
        "passes/call_trial.py",
        "dim - view.dim(), stride // base.stride(origin)",
        "dim - view.dim(), 1",
        ("tests/rewrites/test_positions.py",),
    ),
    Fault(
        "a part of the queries sees the keys of the first ones",
        "passes/rewrites/masked_attention.py",
        "shift = rows.start - keys.start",
        "shift = 0",
        ("tests/rewrites/test_positions.py::test_a_band_makes_the_mask_of_some_queries_and_keys",),
    ),
    Fault(
        "a verdict forgets whole numbers",
        "tools/verification/compare.py",
        "            return 0.0\n        by_dtype",
        "            return 0.5 if self.given is None else self.given\n        by_dtype",
        (
            "tests/verification/test_verify.py::"
            "test_relative_to_the_tensor_itself_but_not_below_a_hundredth_of_its_kind",
        ),
    ),
    Fault(
        "a key that the compiled model lacks is no difference",
        "tools/verification/compare.py",
        '        return float("inf"), "missing"\n',
        '        return 0.0, ""\n',
        (
            "tests/verification/test_verify.py::"
            "test_relative_to_the_tensor_itself_but_not_below_a_hundredth_of_its_kind",
        ),
    ),
]
