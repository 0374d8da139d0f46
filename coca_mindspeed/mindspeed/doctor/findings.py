"""One thing that the doctor looked at."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing looked at; ``fix`` is empty where it is as wanted."""

    name: str
    found: str
    wanted: str
    fix: str = ""

    @property
    def ok(self) -> bool:
        return not self.fix


def finding(name: str, found: str | None, wanted: str, ok: bool, fix: str) -> Diagnosis:
    return Diagnosis(name, found or "nothing", wanted, "" if ok else fix)
