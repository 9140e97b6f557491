"""AgreedTables: has the ranks to whose devices blocks are dealt run tables that are one step together.

Before the first step with a table the ranks look at the tables of their host: together they are one step, in which
every message meets its partner and nobody waits in a circle. Then all look at what passes between hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatrain.errors import RanksError
from megatrain.files.digest import digest_of
from megatrain.passes.split.dealt_program import DealtProgram, deal, whole_of
from megatrain.planning.step_programs import StepPrograms
from megatrain.ranks.ranks import Ranks
from megatrain.scheduler.check.devices_rules import check_devices
from megatrain.scheduler.check.hosts_rules import HostSums, check_hosts, host_sums
from megatrain.scheduler.from_program import merge_programs
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.training.setup import Setting

Tell = Callable[[Ranks, dict[str, Any], str], Sequence[Mapping[str, Any]]]
"""Tells all ranks something in a call that it names, and returns what all tell, by rank."""
DealAs = Callable[[Sequence[StepPrograms], StepKind, Sequence[int]], None]
"""Has the step of some captures planned anew, with each block dealt to the device that is given."""
# Tables whose digests are kept.
_MOST = 16


class AgreedTables:
    """Agrees on tables.

    Args:
        ranks: Those that train together.
        tell: See `Tell`.
    """

    def __init__(self, ranks: Ranks, tell: Tell):
        self._ranks, self._of_tell = ranks, tell
        self._checked: set[tuple[str, ...]] = set()
        self._digests: dict[int, tuple[Setting, dict[str, str]]] = {}

    def _tell(self, word: dict[str, Any], at: str) -> Sequence[Mapping[str, Any]]:
        return self._of_tell(self._ranks, word, at)

    def agreed(self, setting: Setting, again: Callable[[], Setting], deal_as: DealAs, at: str) -> Setting:
        """Has all ranks run programs that are rewritten and dealt alike, and looks at their tables together.

        Args:
            setting: Of this rank.
            again: Makes another, with captures that are rewritten further or dealt otherwise.
            deal_as: See `DealAs`; as on the host of rank 0. By themselves hosts may deal micro-batches of other sizes
                otherwise.
            at: The call in which all ranks are, in words.

        Raises:
            RanksError: If another rank fails, or has other programs.
            ScheduleError: If the tables aren't those of one step.
        """
        while True:
            level, devices = max(capture.least for capture in setting.captures), _devices(setting)
            words = self._tell({"level": level, "devices": devices, **self._digests_of(setting)}, at)
            most = max(word["level"] for word in words)
            if any(word["level"] != most for word in words):
                for capture in setting.captures:
                    capture.least = most
                setting = again()
                continue
            self._check_alike(words)
            if any(word["devices"] != words[0]["devices"] for word in words):
                if devices != words[0]["devices"]:
                    deal_as(setting.captures, setting.kind, words[0]["devices"])
                setting = again()
                continue
            tables = tuple(word["table"] for word in words)
            if tables not in self._checked:
                self._check_tables(setting, at)
                self._checked.add(tables)
            return setting

    def _check_tables(self, setting: Setting, at: str) -> None:
        """Looks at the tables of this host, and then at what passes between hosts."""
        host, words = self._ranks.host, self._tell({"text": str(setting.schedule)}, at)
        assert host is not None
        tables = _schedules(setting, [words[rank]["text"] for rank in host.ranks])
        graph = check_devices(tables)
        if not self._ranks.is_one_host:
            words = self._tell({"sums": host_sums(tables, graph).to_json()} if host.index == 0 else {}, at)
            check_hosts([HostSums.from_json(words[mates[0]]["sums"]) for mates in self._ranks.hosts])

    def _digests_of(self, setting: Setting) -> dict[str, str]:
        """Of the table and of the programs, which are the same objects from step to step."""
        key = id(setting.schedule)
        if key not in self._digests or self._digests[key][0].programs != setting.programs:
            while len(self._digests) >= _MOST:
                self._digests.pop(next(iter(self._digests)))
            found = {
                "table": digest_of(str(setting.schedule).encode()),
                "program": _digest(setting),
                "trained": _trained(setting),
            }
            self._digests[key] = setting.without_tensors(), found
        return self._digests[key][1]

    def _check_alike(self, words: Sequence[Mapping[str, Any]]) -> None:
        for first, *mates in self._ranks.hosts:
            if words[first]["trained"] != words[0]["trained"]:
                raise RanksError(
                    f"the ranks differ: rank {first} has other blocks than rank 0, or trains other parameters.\n"
                    "  Sums of each block's gradients go from host to host, so that all hosts have the same blocks.\n"
                    "  Build the model alike on each rank, with the same options and the same version of torch."
                )
            for rank in mates:
                if words[rank]["program"] != words[first]["program"]:
                    raise RanksError(
                        f"the ranks differ: rank {rank} has captured another program than rank {first}.\n"
                        "  Ranks to which the blocks of a model are dealt run one program.\n"
                        "  Build the model alike on each rank, with the same options and the same version of torch."
                    )


def _schedules(setting: Setting, texts: Sequence[str]) -> list[Schedule]:
    """The tables of all devices, read from texts, with the workloads of their parts."""
    found: list[Schedule] = []
    for device, text in enumerate(texts):
        parts: dict[int, DealtProgram] = {}
        for program in setting.programs:
            assert isinstance(program, DealtProgram)
            parts[id(program)] = deal(program.whole, program.devices, device)
        workload = merge_programs([parts[id(program)] for program in setting.programs]).workload
        found.append(Schedule.parse(text, workload))
    return found


def _devices(setting: Setting) -> list[int]:
    """The device of each block of the whole program."""
    (devices,) = {program.devices for program in setting.programs if isinstance(program, DealtProgram)}
    return list(devices)


def _trained(setting: Setting) -> str:
    """A digest of what each block of the whole program trains."""
    whole = whole_of(setting.programs[0])
    entries = [[whole.state[key] for key in block.binding] for block in whole.blocks]
    texts = [[f"{e.key} {e.spec.dtype}{e.spec.shape}" for e in each if e.requires_grad] for each in entries]
    return digest_of("\n".join(map(str, texts)).encode())


def _digest(setting: Setting) -> str:
    """Of the whole programs and how they are dealt; each rank's device has another number."""
    found = [program for program in setting.programs if isinstance(program, DealtProgram)]
    texts = [f"{p.devices}\n{p.whole}".replace(f"'{p.device}'", "'the device'") for p in found]
    return digest_of("\n".join(texts).encode())
