"""Resource limits that can be lowered and never raised."""

import resource


def limit_resource(name: str, value: int) -> None:
    """Set the soft and the hard limit ``name`` to ``value``, or to the inherited hard limit where that is lower.

    A hard limit is never raised: an unprivileged process may not, and root must not undo its batch system's limits.
    """
    kind = getattr(resource, name)
    hard = resource.getrlimit(kind)[1]
    limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (limit, limit))
