"""Tally: what was tried, what held, and how to see again what did not."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Tally:
    """Counts trials by class.

    Attributes:
        tried: How many of each class.
        failures: What went wrong, by class, each with what repeats it.
    """

    tried: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failures: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, complaint: str | None, repeat: str) -> None:
        """Counts one trial; `complaint` says what is wrong, None that all is well."""
        self.tried[name] += 1
        if complaint is not None:
            self.failures[name].append(f"{repeat}\n      {complaint}")
            print(f"NOT HELD  {name}: {self.failures[name][-1]}", flush=True)

    @property
    def has_failed(self) -> bool:
        return any(self.failures.values())

    def __str__(self) -> str:
        rows = [("class", "tried", "held", "not")]
        for name, tried in self.tried.items():
            failed = len(self.failures[name])
            rows.append((name, str(tried), str(tried - failed), str(failed)))
        total, failed = sum(self.tried.values()), sum(map(len, self.failures.values()))
        rows.append(("all", str(total), str(total - failed), str(failed)))
        width = max(len(row[0]) for row in rows)
        return "\n".join(f"{a:<{width}}  {b:>6}  {c:>6}  {d:>6}" for a, b, c, d in rows)
