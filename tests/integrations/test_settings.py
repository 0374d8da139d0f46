"""Settings, releases and grading that the integrations share; the frameworks themselves: tests/integration."""

import contextlib
import re
from pathlib import Path

import pytest
from packaging.version import Version

from coca_mindspeed.algorithm.methods import METHODS
from coca_mindspeed.data.export import trl_row
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import CocaError, ConfigError, DataError
from coca_mindspeed.integrations import ms_swift, settings
from coca_mindspeed.integrations.settings import (
    RowGrader,
    check_held_out,
    check_sources,
    check_version,
    integration_settings,
    rows_of_process,
)
from coca_mindspeed.upstream import manifest as manifests
from coca_mindspeed.upstream.manifest import Hook, Manifest, ManifestError, fingerprint, load_manifests

ROOT = Path(__file__).parents[2]
STAGED = [name for name, method in METHODS.items() if len(method.stages) > 1]


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ({"method": {"advantage_scale": "batch"}, "grader": "exact"}, []),
        ({"method": {"name": "sequential"}, "stage": 1}, []),
        ({"method": {"name": "caliber"}, "stage_shares": [1, 3]}, []),
        ({"stage": 1}, ["coca.stage"]),
        ({"method": {"name": "caliber"}, "stage": 0, "stage_shares": [1, 3]}, ["coca.stage_shares"]),
        ({"method": {"name": "caliber"}, "stage_shares": [1, 2, 3]}, ["coca.stage_shares"]),
        ({"method": {"name": "caliber"}, "stage_shares": [0, 1]}, ["coca.stage_shares.0"]),
        ({"method": {"clip": 0.2, "loss_aggregation": "sum"}}, ["coca.method.clip", "coca.method.loss_aggregation"]),
        ({"method": {"name": "coco"}}, ["coca.method.name"]),
        ({"method": {"entropy_bonus": 0.02}}, []),
        ({"bad": 1}, ["coca.bad"]),
    ],
)
def test_keys_that_cannot_have_an_effect_are_refused(section, keys):
    if not keys:
        integration_settings(section, "trl")
        return
    with pytest.raises(ConfigError) as refusal:
        integration_settings(section, "trl")
    assert [problem.key for problem in refusal.value.problems] == keys


def test_ms_swift_passes_no_log_probs_to_the_functions_that_the_plugin_replaces():
    with pytest.raises(ConfigError) as refusal:
        integration_settings({"method": {"entropy_bonus": 0.02, "clip": 0.2}}, "ms_swift")
    assert {(each.code, each.key) for each in refusal.value.problems} == {
        ("elsewhere", "coca.method.entropy_bonus"),
        ("elsewhere", "coca.method.clip"),
    }


@pytest.mark.parametrize("name", STAGED)
@pytest.mark.parametrize(
    ("more", "keys"),
    [
        ({}, {"coca.stage"}),
        ({"stage": 1}, set()),
        ({"stage_shares": [1, 1]}, {"coca.stage", "coca.stage_shares"}),
    ],
)
def test_a_framework_without_steps_needs_a_stage(name, more, keys):
    with pytest.raises(ConfigError) if keys else contextlib.nullcontext() as refusal:
        integration_settings({"method": {"name": name}, **more}, "ms_swift")
    assert not keys or {problem.key for problem in refusal.value.problems} == keys


@pytest.mark.parametrize(
    ("section", "total", "stages"),
    [
        ({"name": "coca"}, 4, [0, 0, 0, 0]),
        ({"name": "caliber"}, 4, [0, 0, 1, 1]),
        ({"name": "sequential"}, 5, [0, 0, 0, 1, 1]),
        ({"name": "caliber", "stage_shares": [0.1, 0.2]}, 3, [0, 1, 1]),
        ({"name": "caliber", "stage_shares": [1, 3]}, 8, [0, 0, 1, 1, 1, 1, 1, 1]),
        ({"name": "caliber", "stage": 1}, 4, [1, 1, 1, 1]),
        ({"name": "caliber"}, 0, [0]),
    ],
)
def test_stages_share_the_steps(section, total, stages):
    more = {key: section[key] for key in section.keys() - {"name"}}
    settings = integration_settings({"method": {"name": section["name"]}, **more}, "trl")
    assert [settings.stage_at(step, total) for step in range(max(total, 1))] == stages
    assert settings.stage_at(total + 1, total) == stages[-1]


@pytest.mark.parametrize(("found", "accepted"), [("4.5.9", False), ("4.6.0", True), ("4.7.0.dev0", False)])
def test_only_tested_releases(monkeypatch, found, accepted):
    monkeypatch.setattr(settings, "version", lambda package: found)
    if accepted:
        check_version("ms-swift", "==4.6.0")
    else:
        with pytest.raises(CocaError, match=found):
            check_version("ms-swift", "==4.6.0")


def test_the_extras_admit_what_was_tested():
    """A TRL is accepted by its sources: its oldest release is that of the oldest manifest, and there is no newest."""
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    tested = re.search(r'^TESTED = "(.+)"$', ms_swift.PLUGIN.read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert f'"ms-swift": ["ms-swift{tested}"' in setup
    oldest = min((manifest.release for manifest in load_manifests(package="trl")), key=Version)
    assert f'"trl": ["trl>={Version(oldest).major}.{Version(oldest).minor}"]' in setup


SMALL_TRL = "class GRPOTrainer:\n    def _compute_loss(self):\n        return {}\n"


def test_a_package_is_accepted_by_its_sources(tmp_path, monkeypatch):
    """Comments may differ; another text is refused by the name of the definition, and so is a missing one."""
    package = tmp_path / "trl"
    (package / "trainer").mkdir(parents=True)
    (package / "__init__.py").touch()
    source = package / "trainer" / "grpo_trainer.py"
    source.write_text(SMALL_TRL.format(0))
    target = "trl.trainer.grpo_trainer:GRPOTrainer._compute_loss"
    hook = Hook(target, "use", "both", "called", fingerprint(tmp_path, target))
    manifest = Manifest(tmp_path / "trl.yaml", "1.16.0", "v1.16.0", (hook,), "trl")
    monkeypatch.setattr(manifests, "load_manifests", lambda package: [manifest])
    monkeypatch.syspath_prepend(tmp_path)
    check_sources("trl")
    source.write_text(SMALL_TRL.format("0  # the sum"))
    check_sources("trl")
    for changed in (SMALL_TRL.format(1), "class GRPOTrainer:\n    pass\n"):
        source.write_text(changed)
        with pytest.raises(ManifestError, match="_compute_loss"):
            check_sources("trl")


def test_rows_are_checked_and_graded():
    records = [Record(str(n), "sums", "arithmetic", f"{n}+1", str(n + 1)) for n in range(3)]
    texts = [trl_row(each, None, 0)["record"] for each in records]
    grader = RowGrader(integration_settings({"grader": "exact"}, "trl"))
    grader.check("train", texts)
    assert grader.grade(texts, ["1", "3", " 3"]) == [True, False, True]
    with pytest.raises(DataError, match="train: row 2"):
        grader.check("train", [texts[0], "{}"])
    with pytest.raises(DataError, match="data export"):
        grader.grade([None], ["1"])


@pytest.mark.parametrize(("number", "processes"), [(1, 1), (3, 1), (1, 4), (3, 4)])
def test_each_process_has_its_own_rows_of_all(number, processes):
    """Joined in the order of the ranks, they are all rows again."""
    gathered = list(range(number * processes))
    parts = [gathered[rows_of_process(number, rank)] for rank in range(processes)]
    assert [row for part in parts for row in part] == gathered
    assert {len(part) for part in parts} == {number}


@pytest.mark.parametrize(
    ("evaluations", "refused"),
    [
        ({"eval_dataset": ["c", "d"]}, []),
        ({"eval_dataset": ["a"]}, []),
        ({"eval_dataset": ["b", "a"]}, ["eval_dataset"]),
        ({"sums": ["c"], "copies": ["a", "b"]}, ["copies"]),
        ({"eval_dataset": None}, []),  # streamed
    ],
)
def test_an_evaluation_on_the_prompts_of_the_training_is_refused(evaluations, refused):
    streamed = iter(())
    named = {"train_dataset": ["a", "b"], **evaluations}
    columns = {name: streamed if prompts is None else {"prompt": prompts} for name, prompts in named.items()}
    with pytest.raises(ConfigError) if refused else contextlib.nullcontext() as refusal:
        check_held_out(columns)
    assert not refused or [(problem.code, problem.key) for problem in refusal.value.problems] == [
        ("same-data", name) for name in refused
    ]
