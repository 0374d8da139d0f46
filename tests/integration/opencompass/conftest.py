"""These tests run in OpenCompass's own environment (`make test-opencompass`)."""

import importlib.util

# Without OpenCompass nothing here can even be imported.
collect_ignore = (
    [] if importlib.util.find_spec("opencompass") else ["test_opencompass_run.py", "test_opencompass_evaluator.py"]
)
