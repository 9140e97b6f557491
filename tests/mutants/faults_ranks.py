"""Faults of several processes: how ranks meet, add up gradients, share state and wait for each other."""

from __future__ import annotations

from tests.mutants.fault import Fault

_PARITY, _DRAWN, _SHARING, _FAILURES = (
    f"tests/ranks/test_{name}.py" for name in ("parity", "drawn_models", "sharing", "failures")
)
_BITS = f"{_PARITY}::test_ranks_with_a_micro_batch_each_have_the_bits_of_one_process"

FAULTS: list[Fault] = [
    Fault(
        "a rank doesn't wait for the letters of a meeting",
        "ranks/processes.py",
        "int(met.min()) >= number",
        "int(met.min()) >= number - 1",
        (_FAILURES,),
    ),
    Fault(
        "the letters of a meeting take the place of those before, which others may not have read",
        "ranks/processes.py",
        "number, which = self._num_meetings, self._num_meetings % 2",
        "number, which = self._num_meetings, 0",
        (f"{_SHARING}::test_ranks_hear_all_in_each_meeting",),
    ),
    Fault(
        "gradients are added in another order than that of ranks",
        "ranks/landings.py",
        "            terms = [self._flat(entry, rank, block) for rank in there]\n",
        "            terms = [self._flat(entry, rank, block) for rank in there[::-1]]\n",
        (_BITS,),
    ),
    Fault(
        "a rank adds gradients up before all have landed",
        "ranks/rank_exchange.py",
        "        self._here.wait_for(block, summed=False, go_on=go_on)\n",
        "",
        (_BITS, _DRAWN),
    ),
    Fault(
        "a rank goes on before the others have updated their parts",
        "ranks/division.py",
        "            return not left or (gives_up and any(left.values()))\n",
        "            return True\n",
        (f"{_SHARING}::test_ranks_wait_for_a_slow_update_of_another",),
    ),
    Fault(
        "who takes over an update has no gradient that a hook has made",
        "ranks/division.py",
        "            return self._store.twins[Name(GRADIENT, key)].shared\n",
        "            return torch.zeros_like(parameter)\n",
        (_BITS,),
    ),
    Fault(
        "memory of another process is taken for that of rank 0",
        "ranks/shared_memory.py",
        "if found._token != token:",
        "if False:",
        (f"{_FAILURES}::test_what_several_ranks_cannot_do_is_refused_by_name",),
    ),
    Fault(
        "what a rank alone has written is taken for what all have",
        "ranks/division.py",
        "if name not in self._new and twins[name].has_changed]",
        "if False]",
        (f"{_SHARING}::test_what_one_rank_alone_writes_is_refused_and_named",),
    ),
]
