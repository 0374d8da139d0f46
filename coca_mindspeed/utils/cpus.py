"""Number of usable CPUs."""


def usable_cpus() -> int:
    """Return the number of CPUs by this process's affinity and its container's quota."""
    from joblib import cpu_count  # a third of a second

    return int(cpu_count())
