"""Verifiers of MindSpeed-RL are tried with a right and a wrong answer, where its checkout is at hand."""

import pytest

from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed.start.process import CPU_SHIM
from coca_mindspeed.mindspeed.start.verifiers import try_verifiers
from tests.mindspeed.builders import write

# Slow once, as a pool that starts its processes; a gold answer must stand in a box.
VERIFIERS = """
calls = []
def score(name, answer, label):
    right = "boxed{" + label + "}" in answer
    if name == "slow":
        calls.append(1)
        return float(right and len(calls) > 8)
    return {"acc": 1.0 if right else -0.5, "half": right / 2, "format": 0.0, "always": 1.0}[name]

def verifier(answers, data, config):
    [name], [weight] = config.verifier_function, config.verifier_weight
    return [weight * score(name, answer, label) for answer, label in zip(answers, data["labels"], strict=True)], {}
"""
ACCEPTED, NOT_TRIED, FUNCTION, WEIGHT = "accepted", "not tried", "verifier_function", "verifier_weight"


@pytest.mark.parametrize(
    ("names", "changes", "category", "result"),
    [
        (["acc"], {}, "math", ACCEPTED),
        (["slow"], {}, "math", ACCEPTED),
        (["acc"], {}, "factual", FUNCTION),  # the prompt asks for a short answer, without a box
        (["acc"], {}, "code", NOT_TRIED),
        (["coca"], {}, "math", ACCEPTED),
        *(([name], {}, "math", FUNCTION) for name in ("format", "always")),
        (["acc", "format"], {"verifier_weight": [1.0, 1.0]}, "math", FUNCTION),
        (["half"], {}, "math", WEIGHT),
        (["half"], {"verifier_weight": [2.0]}, "math", ACCEPTED),
        (["half", "half"], {"verifier_weight": [1.0, 1.0]}, "math", ACCEPTED),
        (["half", "half"], {}, "math", WEIGHT),  # MindSpeed-RL has one weight by default
        (["acc", "acc"], {"verifier_weight": [1.0, 1.0]}, "math", WEIGHT),
        (["acc", "acc"], {"verifier_weight": [1.0]}, "math", WEIGHT),
        (["gone"], {}, "math", FUNCTION),
    ],
)
def test_verifiers(homes, monkeypatch, capsys, names, changes, category, result):
    monkeypatch.delenv(CPU_SHIM, raising=False)
    write(homes["MINDSPEED_RL_HOME"] / "mindspeed_rl/models/rule_verifier.py", VERIFIERS)
    records = [Record(text, "d", category, "?", text) for text in ("391", "17")]
    values = {"rl_config": {"verifier_function": names, **changes}}
    given = records, method_settings(), {name: str(path) for name, path in homes.items()}
    if result in (ACCEPTED, NOT_TRIED):
        try_verifiers(values, *given, starts=True)
        assert (names[0] in capsys.readouterr().err) == (result == NOT_TRIED)
        return
    with pytest.raises(ConfigError) as refused:
        try_verifiers(values, *given, starts=True, prefix="mindspeed_rl.")
    [problem] = refused.value.problems
    assert problem.key == f"mindspeed_rl.rl_config.{result}"


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize(("module", "refused"), [(None, False), ("import no_such_package\n", True)])
def test_where_upstream_cannot_be_imported_only_a_start_is_refused(homes, capsys, starts, module, refused):
    if module is not None:
        write(homes["MINDSPEED_RL_HOME"] / "mindspeed_rl/models/rule_verifier.py", module)
    environment = {name: str(path) for name, path in homes.items()}
    records = [Record("1", "d", "math", "?", "391")]
    given = {"rl_config": {"verifier_function": ["acc"]}}, records, method_settings(), environment
    if starts and refused:
        with pytest.raises(ConfigError):
            try_verifiers(*given, starts=True)
    else:
        try_verifiers(*given, starts=starts)
        assert "acc" in capsys.readouterr().err
