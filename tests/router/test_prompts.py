"""The form of the prompts that a tier sends: from an export, by category, and pinned by a certificate."""

import json

import numpy as np
import pytest

from coca_mindspeed.algorithm.parsing import SYSTEM_PROMPTS
from coca_mindspeed.config.prompt_form import PromptForm, TrainedPrompt
from coca_mindspeed.evaluation.predictions import Prediction, read_predictions, write_predictions
from coca_mindspeed.local.tiny_model import write_tiny_model
from coca_mindspeed.utils.json_files import write_json
from coca_router.cli import main
from tests.router.servers_for_tests import ANSWER, QUESTION, SURE, FakeEngine, exported, http, logged, routed

ONE = {"factual": " Briefly."}
SEVERAL = {"math": " Think.", "factual": " Briefly.", "code": None}
CONFIDENCE = {"role": "system", "content": SYSTEM_PROMPTS["first"]}
ASKED = QUESTION[0]["content"]


def export(directory, instructions, *, method="coca", system_prompt=SYSTEM_PROMPTS["first"], decimals=None):
    """The file of a model's form, as an export has it."""
    directory.mkdir(exist_ok=True)
    form = PromptForm(system_prompt=system_prompt, instructions=instructions, decimals=decimals)
    trained = TrainedPrompt(form=form, method=method, max_new_tokens=64)
    write_json(directory / "coca_prompt.json", trained.model_dump(mode="json"))
    return form


def post(url, messages=QUESTION, **headers):
    return http.post(f"{url}/chat/completions", json={"model": "coca", "messages": messages}, headers=headers)


def serving(tmp_path, **tier):
    values = {
        "backends": {"a": {"url": "http://127.0.0.1:9/v1", "model": "small"}},
        "tiers": [{"name": "t", "backend": "a", "bands": ANSWER, **tier}],
    }
    (tmp_path / "serving.yaml").write_text(json.dumps(values))
    return ["serve", str(tmp_path / "serving.yaml"), "--check"]


# Instructions of the form, category of the tier, header of the request; the text behind the question, None: 400.
SENT = [
    (ONE, None, None, " Briefly."),
    (ONE, "factual", None, " Briefly."),
    (ONE, "request", "factual", " Briefly."),
    (ONE, None, "factual", None),
    (SEVERAL, "math", None, " Think."),
    (SEVERAL, "code", None, ""),
    (SEVERAL, "request", "math", " Think."),
    (SEVERAL, "request", "code", ""),
    (SEVERAL, "request", None, None),
    (SEVERAL, "request", "maths", None),
    ({"math": ""}, None, None, ""),
]


@pytest.mark.parametrize(("instructions", "category", "header", "text"), SENT)
def test_a_tier_sends_the_instruction_of_its_category(instructions, category, header, text, tmp_path):
    export(tmp_path / "exported", instructions)
    tier = {"form": str(tmp_path / "exported"), "bands": ANSWER, **({"category": category} if category else {})}
    engine = FakeEngine(*SURE)
    with routed(engine, small_tier=tier) as (url, _):
        answer = post(url, **({"x-coca-category": header} if header else {}))
        if text is None:
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-coca-category")
            assert not engine.requests
            return
        assert answer.status_code == 200
    assert engine.requests[0]["messages"] == [CONFIDENCE, {"role": "user", "content": ASKED + text}]


# Messages of a client at a tier whose form ends questions by " Briefly."; the messages of the backend.
SHOT = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]
WHOLE = [CONFIDENCE, {"role": "user", "content": f"{ASKED} Briefly."}]
MESSAGES = [
    (QUESTION, WHOLE),
    (WHOLE, WHOLE),
    ([*SHOT, *QUESTION], [CONFIDENCE, *SHOT, WHOLE[1]]),
    (
        [{"role": "developer", "content": "Be kind."}, *QUESTION],
        [{"role": "system", "content": f"{SYSTEM_PROMPTS['first']}\n\nBe kind."}, WHOLE[1]],
    ),
]


@pytest.mark.parametrize(("given", "sent"), MESSAGES)
def test_a_message_that_has_its_part_of_the_form_is_taken_as_it_is(given, sent, tmp_path):
    export(tmp_path / "exported", ONE)
    engine = FakeEngine(*SURE)
    with routed(engine, small_tier={"form": str(tmp_path / "exported"), "bands": ANSWER}) as (url, _):
        assert post(url, given).status_code == 200
    assert engine.requests[0]["messages"] == sent


def test_a_confidence_of_other_decimals_is_invalid_as_in_training(tmp_path):
    export(tmp_path / "exported", ONE, decimals=2)
    tier = {"form": str(tmp_path / "exported"), "bands": ANSWER, "invalid": "refuse"}
    for pieces, action in ((("<confidence>0.90</confidence>x",), "answer"), (SURE, "refuse")):
        with routed(FakeEngine(*pieces), small_tier=tier) as (url, _):
            assert post(url).json()["coca"]["action"] == action


# Keys of a tier, and those of the form of its export, at which the start is refused.
REFUSED = [
    ({}, {"instructions": SEVERAL}, "tiers: t.category"),
    ({"category": "maths"}, {"instructions": SEVERAL}, "'math'"),
    ({}, {"instructions": {}}, "tiers: t.category"),
    ({}, {"instructions": ONE, "method": "rlcr"}, "tiers: t.form"),
    ({"system_prompt": "S"}, {"instructions": ONE}, "system_prompt"),
    ({"form": None, "category": "math"}, {"instructions": ONE}, "category"),
    ({"form": "nowhere"}, {"instructions": ONE}, "nowhere"),
]


@pytest.mark.parametrize(("tier", "form", "named"), REFUSED)
def test_the_start_is_refused(tier, form, named, tmp_path, capsys):
    export(tmp_path / "exported", **form)
    assert main(serving(tmp_path, **{"form": "exported", **tier})) == 1
    assert named in capsys.readouterr().err


def labelled(path, digests, *, count=400):
    """Predictions that are right with the stated confidence, of the forms in turn."""
    rng = np.random.default_rng(0)
    stated = rng.random(count).round(2).tolist()
    right = (rng.random(count) < stated).tolist()
    forms = [digests[i % len(digests)] for i in range(count)]
    write_predictions(
        path,
        [
            Prediction(str(i), "d", "q", "", s, r, 3, model="small", form=f)
            for i, (s, r, f) in enumerate(zip(stated, right, forms, strict=True))
        ],
    )
    return path


# Categories of the predictions (None: they name no form); keys of a tier with their certificate, and whether it starts.
PINNED = [
    (["math"], {"form": "exported", "category": "math"}, True),
    (["math"], {"form": "exported", "category": "factual"}, False),
    (["math"], {"form": "exported", "category": "request"}, False),
    (["math"], {}, False),
    (["math"], {"system_prompt": "another"}, False),
    (["math", "factual", "code"], {"form": "exported", "category": "request"}, True),
    (["math", "factual"], {"form": "exported", "category": "math"}, False),
    ([None], {}, True),
    ([None], {"form": "exported", "category": "math"}, True),
    ([None], {"system_prompt": "another"}, False),
    (["math", None], {"form": "exported", "category": "factual"}, True),
]


@pytest.mark.parametrize(("categories", "tier", "starts"), PINNED)
def test_a_certificate_pins_the_form_of_its_predictions(categories, tier, starts, tmp_path, capsys):
    digests = export(tmp_path / "exported", SEVERAL).digests()
    file = labelled(tmp_path / "p.jsonl", [digests.get(category) for category in categories])
    assert main(["calibrate", str(file), "--output", str(tmp_path / "m.json"), "--risk", "0.3"]) == 0
    printed, unknown = capsys.readouterr(), None in categories
    identity = json.loads((tmp_path / "m.json").read_text())["identity"]
    assert identity["forms"] == ("unknown" if unknown else sorted(digests[category] for category in categories))
    assert ("form unknown" in printed.out, "warning" in printed.err) == (unknown, unknown)
    assert main(serving(tmp_path, bands=None, certificate="m.json", **tier)) == (0 if starts else 1)
    err = capsys.readouterr().err
    assert ("form unknown" in err) == (unknown and starts)


def test_a_certificate_of_an_earlier_version_is_read_as_unknown(tmp_path, capsys):
    export(tmp_path / "exported", ONE)
    file = labelled(tmp_path / "p.jsonl", [None])
    assert main(["calibrate", str(file), "--output", str(tmp_path / "m.json"), "--risk", "0.3"]) == 0
    content = json.loads((tmp_path / "m.json").read_text())
    assert content["version"] == 2
    del content["identity"]["forms"]
    (tmp_path / "m.json").write_text(json.dumps(content))
    assert main(serving(tmp_path, bands=None, certificate="m.json")) == 0
    assert "form unknown" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("categories", "keys"),
    [(["math"], {"category": "math"}), (["math", "factual", "code"], {"category": "request"}), ([None], None)],
)
def test_the_tier_that_calibrate_and_route_print_has_the_form(categories, keys, tmp_path, capsys):
    digests = export(tmp_path, SEVERAL).digests()
    digests = [digests.get(category) for category in categories]
    files = [str(labelled(tmp_path / f"{name}.jsonl", digests)) for name in "pq"]
    assert main(["calibrate", files[0], "--output", str(tmp_path / "m.json")]) == 0
    assert main(["route", *files, "--share", "0.5", "--tokenizer", str(tiny(tmp_path))]) == 0
    wanted = [f"form: {tmp_path / 'coca_prompt.json'}", f"category: {keys['category']}"] if keys else []
    printed = capsys.readouterr().out
    assert [printed.count(text) for text in wanted] == [3] * len(wanted)  # one tier of calibrate, two of route
    assert ("form: " in printed) == bool(wanted)


def tiny(tmp_path):
    write_tiny_model(tmp_path / "tiny", 0)
    return tmp_path / "tiny"


def test_a_system_prompt_besides_the_forms_of_predictions_is_refused(tmp_path):
    (tmp_path / "s.txt").write_text("S")
    file = labelled(tmp_path / "p.jsonl", ["0" * 16])
    arguments = ["--system-prompt", str(tmp_path / "s.txt"), "--output", str(tmp_path / "m.json")]
    assert main(["calibrate", str(file), *arguments]) == 2


def test_a_certified_tier_takes_its_own_system_prompt_from_a_client(tmp_path):
    digests = export(tmp_path / "exported", ONE).digests()
    file = labelled(tmp_path / "p.jsonl", [digests["factual"]])
    assert main(["calibrate", str(file), "--output", str(tmp_path / "m.json"), "--risk", "0.3"]) == 0
    tier = {"form": str(tmp_path / "exported"), "certificate": str(tmp_path / "m.json"), "bands": None}
    engine = FakeEngine(*SURE)
    with routed(engine, small_tier=tier) as (url, _):
        assert post(url, WHOLE).status_code == 200
        for system in ([{"role": "system", "content": "Be kind."}], [CONFIDENCE, CONFIDENCE]):
            assert post(url, [*system, *QUESTION]).status_code == 400


def test_labelled_answers_name_the_form_of_their_prompt(tmp_path):
    form = export(tmp_path / "exported", SEVERAL)
    tier = {"form": str(tmp_path / "exported"), "category": "request", "bands": ANSWER}
    log = tmp_path / "log"
    with routed(FakeEngine(*SURE), small_tier=tier, log={"directory": str(log)}) as (url, _):
        for category in form.instructions:
            id_ = post(url, **{"x-coca-category": category}).json()["id"]
            assert http.post(f"{url}/coca/labels", json={"id": id_, "correct": True}).status_code == 200
        kind = [{"role": "system", "content": "Be kind."}, *QUESTION]
        id_ = post(url, kind, **{"x-coca-category": "math"}).json()["id"]
        http.post(f"{url}/coca/labels", json={"id": id_, "correct": True})
    found = [prediction.form for prediction in exported(log)[1]]
    assert found[:3] == list(form.digests().values())
    assert found[3] not in (None, *found[:3])
    assert [row["form"] for row in logged(log)] == found


@pytest.mark.parametrize(
    ("instructions", "arguments", "code"),
    [
        (ONE, [], 0),
        (SEVERAL, [], 1),
        (SEVERAL, ["--category", "math"], 0),
        (SEVERAL, ["--category", "request"], 0),
        (SEVERAL, ["--raw-prompts"], 0),
        (SEVERAL, ["--category", "maths"], 1),
        (None, [], 0),
        (None, ["--category", "math"], 2),
    ],
)
def test_serve_model_takes_the_form_as_a_tier_does(instructions, arguments, code, tmp_path):
    if instructions is not None:
        export(tiny(tmp_path), instructions)
    else:
        tiny(tmp_path)
    assert main(["serve", "--model", str(tmp_path / "tiny"), "--check", *arguments]) == code


def test_predictions_of_other_programs_name_no_form(tmp_path):
    (tmp_path / "p.csv").write_text("id,confidence,correct\n1,0.5,1\n")
    assert [p.form for p in read_predictions(tmp_path / "p.csv")] == [None]
