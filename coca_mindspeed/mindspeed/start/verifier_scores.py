"""Scores of answers by verifiers of MindSpeed-RL, in a process that imports it: ``python -m ... QUESTION RESULT``."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MODULE = "mindspeed_rl.models.rule_verifier"
_ATTEMPTS = 5  # MindSpeed-RL's pool gives 0 for an answer that takes a second, as one does that starts its processes


def score_answers(question: Path, result: Path) -> None:
    """Write the scores of the answers in ``question``, both JSON; of several attempts, the highest ones.

    ``question`` has the ``paths`` of the checkouts, the module of a CPU ``shim`` or null, the ``names`` of the
    verifiers, the ``answers``, and the ``gold`` answer.  The result has a list of scores by name, or the text of an
    error; the name of an error of the import is "".
    """
    asked = json.loads(question.read_text(encoding="utf-8"))
    by_name: dict[str, Any] = {}
    try:
        # Imported before the path changes: the checkouts have a package ``tests`` of their own.
        if asked["shim"]:
            importlib.import_module(asked["shim"]).install()
        sys.path[:0] = asked["paths"]
        verifier = importlib.import_module(MODULE).verifier
    except Exception as error:  # noqa: BLE001  it is told to the parent
        by_name[""] = f"{type(error).__name__}: {error}"
    else:
        labels = {"labels": [asked["gold"]] * len(asked["answers"])}
        for name in asked["names"]:
            config = SimpleNamespace(verifier_function=[name], verifier_weight=[1.0])
            try:
                tries = [verifier(asked["answers"], labels, config)[0] for _ in range(_ATTEMPTS)]
                by_name[name] = [max(map(float, scores)) for scores in zip(*tries, strict=True)]
            except Exception as error:  # noqa: BLE001
                by_name[name] = f"{type(error).__name__}: {error}"
    result.write_text(json.dumps(by_name), encoding="utf-8")


if __name__ == "__main__":
    score_answers(Path(sys.argv[1]), Path(sys.argv[2]))
