"""CPUs and memory that this process may use, by its affinity and its control group (cgroups(7), versions 1 and 2)."""

from pathlib import Path, PurePosixPath

_NO_LIMIT = 2**60  # version 1 writes the greatest multiple of a page below 2**63


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that this process may use by the limits of its group and of the groups above; None: no limit found."""
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    limits = []
    for line in [*lines, "0::/"]:
        hierarchy, controllers, group = line.split(":", 2)
        mount, name = root / "sys" / "fs" / "cgroup", "memory.max"
        if hierarchy != "0":
            if "memory" not in controllers.split(","):
                continue
            mount, name = mount / "memory", "memory.limit_in_bytes"
        inside = PurePosixPath(group.lstrip("/"))
        for folder in (inside, *inside.parents):
            try:
                text = (mount / folder / name).read_text(encoding="ascii").strip()
            except OSError:  # no such group here, or the root, which has no limit
                continue
            if text.isdecimal() and int(text) < _NO_LIMIT:
                limits.append(int(text))
    return min(limits, default=None)


def usable_cpus() -> int:
    """Return the number of CPUs by this process's affinity and its container's quota."""
    from joblib import cpu_count  # a third of a second

    return int(cpu_count())
