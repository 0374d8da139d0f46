"""The named form of CoCA, on every engine from one file, and the line of the plans that names it."""

from dataclasses import replace

import pytest
import yaml

from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.config.compose import compose_run, config_directory, find_verl_run
from coca_mindspeed.config.plan import form_notes
from coca_mindspeed.integrations.settings import integration_settings
from coca_mindspeed.mindspeed.cluster_run import ClusterRun
from coca_mindspeed.mindspeed.plan import make_plan
from coca_mindspeed.mindspeed.start.run_file import StageFiles, mindspeed_values
from coca_mindspeed.verl import plan as verl_plan
from coca_mindspeed.verl.settings import verl_settings

FILE = config_directory() / "method" / "coca_stable.yaml"
pytestmark = pytest.mark.usefixtures("verls_keys")
FORM = method_settings(**yaml.safe_load(FILE.read_text(encoding="utf-8")))


def test_the_form_has_the_values_of_the_study():
    """Of docs/method.md: a larger eps, a bonus, and as many decimals for every confidence."""
    assert method_settings("coca", confidence_decimals=2, advantage_eps=0.05, entropy_bonus=0.02) == FORM


def test_every_engine_reads_the_form_from_one_file(tmp_path):
    local = compose_run("demo", ["method=coca_stable", "method.max_confidence_tokens=16"]).run
    assert local.method == FORM
    cluster = compose_run("qwen25_7b_910b", ["method=coca_stable", "data.epochs=null"]).run
    assert method_settings(**mindspeed_values(ClusterRun(cluster), 10, StageFiles(tmp_path))["coca"]["method"]) == FORM
    assert make_plan(cluster).problems == ()
    file = find_verl_run("coca_qwen25_7b")
    found = verl_plan.verl_configuration(file, ["coca.method=coca_stable"])
    assert verl_settings(found).method == FORM
    assert integration_settings({"method": "coca_stable"}, "trl").method == FORM


@pytest.mark.parametrize("name", ["qwen25_7b_910b", "llama3_8b_910c"])
def test_the_plan_of_a_launch_script_says_what_the_study_found(name):
    def notes(*overrides):
        plan = make_plan(compose_run(name, overrides).run)
        return [note for note in plan.notes if "method=coca_stable" in note]

    assert len(notes()) == 1
    assert notes("method=coca_stable") == notes("method=rlvr") == notes("method.advantage_eps=0.05") == []


def test_the_plan_of_a_run_on_verl_says_it_too():
    file = find_verl_run("coca_qwen25_7b")
    assert [note for note in verl_plan.make_plan(file, []).notes if "coca.method=coca_stable" in note]
    assert not [note for note in verl_plan.make_plan(file, ["coca.method=coca_stable"]).notes if "coca.method" in note]


def test_a_bonus_or_a_larger_eps_needs_no_note():
    assert list(form_notes(method_settings(), "x"))
    assert not list(form_notes(method_settings(entropy_bonus=0.005), "x"))


@pytest.mark.parametrize("method", ["coca", "rlvr", "sequential"])
def test_local_runs_use_the_form_and_can_leave_it(method):
    data = ["model.path=m", "data.train=t.jsonl", "data.evaluate=e.jsonl"]
    assert compose_run("local", data).run.method == FORM
    assert compose_run("local", [*data, f"method={method}"]).run.method == method_settings(method)
    laptop = compose_run("laptop", [*data, "warm_up.records=t.jsonl"]).run.method
    assert laptop == replace(FORM, advantage_scale="batch", advantage_eps=0.5)
