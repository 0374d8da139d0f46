"""How many CPUs there are for this process."""


def usable_cpus() -> int:
    """CPUs that this process may keep busy: by its affinity, and by the quota of its container."""
    from joblib import cpu_count  # a third of a second

    return int(cpu_count())
