"""For every test: hypothesis holds no example to a limit in wall time, which a busy machine breaks by itself."""

import importlib.util

# The environments of tests/integration do without it.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")
