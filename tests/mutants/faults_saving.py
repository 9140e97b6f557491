"""Faults of checkpoints."""

from __future__ import annotations

from tests.mutants.fault import Fault

FILES, GENERATORS, INTERRUPTED = (f"tests/saving/test_{name}.py" for name in ("files", "generators", "interrupted"))

FAULTS: list[Fault] = [
    Fault(
        "a tensor isn't compared with its checksum",
        "files/load.py",
        "if kind is None and digest != self._saved.digest:",
        "if kind is None and digest is None:",
        (f"{FILES}::test_a_damaged_tensor_is_named_when_it_is_read",),
    ),
    Fault(
        "a tensor is read one byte too late",
        "files/load.py",
        "        self._file.seek(saved.start)\n",
        "        self._file.seek(saved.start + 1)\n",
        (f"{FILES}::test_tensors_apart_are_read_one_by_one_and_are_no_weights",),
    ),
    Fault(
        "autograd doesn't see that weights were read",
        "files/load.py",
        "            increment_version(out)  # numpy",
        "            pass  # numpy",
        ("tests/saving/test_round_trip.py::test_the_users_parameters_see_that_they_changed",),
    ),
    Fault(
        "a save that died between its renames leaves nothing that is found",
        "files/replace.py",
        "    return next((partial for partial in twins if partial.exists()), folder)\n",
        "    return folder\n",
        (f"{INTERRUPTED}::test_between_the_renames_the_new_one_is_found_without_writing_anything",),
    ),
    Fault(
        "a save that fails between its renames doesn't bring the previous one back",
        "files/replace.py",
        "        disk.rename(old, folder)\n",
        "        pass\n",
        (f"{INTERRUPTED}::test_every_operation_on_the_disk_may_be_the_last",),
    ),
    Fault(
        "leftovers of a save that died stay",
        "files/replace.py",
        "        if folder.exists() or _PARTIAL in",
        "        if folder.exists() and _PARTIAL not in",
        (f"{INTERRUPTED}::test_every_operation_on_the_disk_may_be_the_last",),
    ),
    Fault(
        "Python's generator isn't restored",
        "files/generators.py",
        '    random.setstate(state["python"])\n',
        "",
        (f"{GENERATORS}::test_the_compute_device_s_generator_goes_on",),
    ),
    Fault(
        "a device of another kind goes on with the state of the first",
        "files/generators.py",
        "    if kind != here:\n",
        "    if False:\n",
        (f"{GENERATORS}::test_on_another_kind_of_device_a_run_says_that_its_numbers_differ_and_repeats_itself",),
    ),
    Fault(
        "a list in the place of a number is accepted",
        "files/optimizers.py",
        "    if here is not there or (here in",
        "    if (here in",
        ("tests/saving/test_forged.py::test_options_of_groups_stay_what_they_are",),
    ),
]
