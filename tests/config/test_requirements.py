"""The reader of requirements: which values a row accepts, and which problems a table yields."""

from types import SimpleNamespace

import pytest

from coca_mindspeed.config.requirements import Requirement, View, required
from coca_mindspeed.errors import find_problems


class Upstream(View):
    DEFAULTS = {"loss.clip": 0.2}  # noqa: RUF012

    def place(self, key):
        return key.replace("either.", "late." if "late" in self.values else "early.")


VALUES = {"loss": {"kind": "mean", "on": 1, "rate": 1, "null": None}, "late": {"stage": "grpo"}, "size": 6, "parts": 4}


@pytest.mark.parametrize(
    ("key", "accepts", "more", "key_of_problem"),
    [
        ("loss.kind", ("mean", "sum"), {}, None),
        ("loss.kind", ("sum",), {}, "loss.kind"),
        ("loss.rate", (1.0,), {}, None),
        ("loss.on", (True,), {}, "loss.on"),  # 1 is not true
        ("loss.clip", (0.2,), {}, None),  # the upstream's default
        ("loss.clip", (0.1,), {}, "loss.clip"),
        ("loss.null", (1,), {}, "loss.null"),
        ("loss.null", (1,), {"optional": True}, None),
        ("loss.absent", (1,), {}, "loss.absent"),
        ("loss.absent", (None,), {}, None),
        ("loss.absent", (1,), {"optional": True}, None),
        ("loss.kind", ("sum",), {"optional": True}, "loss.kind"),
        ("loss.kind", ("sum",), {"when": lambda view: view.value("size") == 5}, None),
        ("loss.absent", (), {"effect": "none"}, None),
        ("loss.null", (), {"effect": "none"}, "loss.null"),
        ("loss.kind", (), {"effect": "none"}, "loss.kind"),
        ("loss.kind", ("mean",), {"effect": "none"}, None),
        ("parts", lambda parts, view: view.value("size") % parts == 0, {}, "parts"),
        ("parts", lambda parts, view: view.value("size") >= parts, {}, None),
        ("either.stage", ("grpo",), {}, None),
        ("either.stage", ("ppo",), {}, "late.stage"),
    ],
)
def test_what_a_row_accepts(key, accepts, more, key_of_problem):
    problem = Requirement("code", key, accepts, "a reason", **more).problem(Upstream(VALUES))
    assert (problem and problem.key) == key_of_problem
    if problem:
        assert (problem.code, problem.value) == ("code", Upstream(VALUES).value(key))


def test_a_table_yields_its_problems_in_order_and_reasons_may_follow_from_the_subject():
    rows = (
        Requirement("first", "size", lambda size, run: size % run.parts == 0, lambda run: f"must divide {run.parts}"),
        Requirement("second", "of.kind", ("sum",), "a reason", "do this"),
        Requirement("third", "size", (1,), "a reason"),
    )
    subject = SimpleNamespace(size=6, parts=4, of=SimpleNamespace(kind="mean"))
    problems = list(required(rows)(subject))
    assert [(each.code, each.key, each.value, each.fix) for each in problems] == [
        ("first", "size", 6, ""),
        ("second", "of.kind", "mean", "do this"),
        ("third", "size", 6, ""),
    ]
    assert "4" in problems[0].expected
    assert "'sum'" in problems[1].expected
    assert find_problems(subject, [required(rows)]) == problems[:2]  # the first of a key
