"""One question on every way from its training to its answers: the same tokens."""

import json
import re
from types import SimpleNamespace

import pytest

from coca_mindspeed.algorithm.parsing import SHORT_ANSWER
from coca_mindspeed.cli import main
from coca_mindspeed.config.prompt_form import read_prompt_file
from coca_mindspeed.evaluation.opencompass.config import with_confidence
from coca_mindspeed.evaluation.predictions import read_predictions
from coca_router.cli import main as router
from coca_router.config import ServingConfig
from coca_router.proxy import Proxy
from tests.local.models_for_tests import write_random_model
from tests.local.runs_for_tests import own_run, write_rows
from tests.router.servers_for_tests import http, served_in_background

pytest.importorskip("openai")
QUESTION = "Capital of Austria?"
ROW = {"question": QUESTION, "answer": "Vienna", "category": "factual"}
# Further fields of a run's records; the instruction of the prompts that are trained.
RECORDS = {
    "default": ({}, f" {SHORT_ANSWER}"),
    "own": ({"metadata": {"instruction": "\nOne word."}}, "\nOne word."),
    "none": ({"metadata": {"instruction": ""}}, ""),
    "system": ({"system": "Be brief."}, f" {SHORT_ANSWER}"),
}


@pytest.fixture
def prompts(monkeypatch):
    """The token ids of every prompt that is sampled from, with the size of its group."""
    from coca_mindspeed.local import respond, sampler
    from coca_router import model_server

    seen = []

    def sample(policy, prompts, *, group_size, **more):
        seen.append((group_size, prompts))
        return original(policy, prompts, group_size=group_size, **more)

    def stream(policy, prompt, **more):
        seen.append((1, [list(prompt)]))
        return stream_of_tokens(policy, prompt, **more)

    original, stream_of_tokens = sampler.sample_responses, model_server.token_stream
    for module in (respond, sampler):
        monkeypatch.setattr(module, "sample_responses", sample)
    monkeypatch.setattr(model_server, "token_stream", stream)
    return seen


def trained(tmp_path, monkeypatch, *rows, more=()):
    """A run of one step and its export."""
    monkeypatch.setattr("coca_mindspeed.local.report.draw_plots", lambda *_: ("", {}))
    model = write_random_model(tmp_path / "base", "qwen2")
    for name in ("train", "heldout"):
        write_rows(tmp_path / f"{name}.jsonl", [{**row, "id": f"{name}-{i}"} for i, row in enumerate(rows)])
    run, export = tmp_path / "run", tmp_path / "exported"
    settings = ["evaluation.final_questions=null", "rollout.group_size=3", *more]
    assert main(["train", *own_run(tmp_path, model), *settings, "--output", str(run), "--quiet"]) == 0
    assert main(["export", str(run), "--output", str(export), "--card"]) == 0
    return run, export


def serve(monkeypatch, *arguments):
    """The application of `coca-router serve`."""
    apps = []

    def take(app, shutdown, **_):
        return SimpleNamespace(run=lambda: apps.append((app, shutdown)))

    with monkeypatch.context() as patched:
        patched.setattr("coca_router.http_server.Server", take)
        assert router(["serve", *map(str, arguments)]) == 0
    return served_in_background(*apps[0])


def post(url, messages, **headers):
    body = {"model": "small", "messages": messages, "max_tokens": 4}
    return http.post(f"{url}/chat/completions", json=body, headers=headers)


def opencompass_messages(form):
    dataset = {
        "abbr": "triviaqa",
        "reader_cfg": {"input_columns": ["question"]},
        "infer_cfg": {
            "prompt_template": {"template": {"round": [{"role": "HUMAN", "prompt": "Q: {question}\nA:"}]}},
            "inferencer": {},
        },
        "eval_cfg": {"evaluator": {"type": "stock"}},
    }
    template = with_confidence(dataset, form=form, category="factual")["infer_cfg"]["prompt_template"]["template"]
    turns = [*template["begin"], *template["round"]]
    roles = {"SYSTEM": "system", "HUMAN": "user"}
    return [{"role": roles[t["role"]], "content": t["prompt"].replace("{question}", QUESTION)} for t in turns]


@pytest.mark.parametrize("records", RECORDS)
def test_one_question_has_the_same_tokens_on_eight_ways(records, tmp_path, monkeypatch, prompts):
    row, instruction = {**ROW, **RECORDS[records][0]}, RECORDS[records][1]
    run, export = trained(tmp_path, monkeypatch, row, row, more=[f"method.thinking={records == 'system'}"])
    found = {}
    found["training"] = next(tokens for size, tokens in prompts if size == 3)[0]
    found["validation"] = next(tokens for size, tokens in prompts if size == 1)[0]

    def sampled(name, action):
        prompts.clear()
        action()
        found[name] = prompts[-1][1][0]

    for model in (run, export):
        sampled(f"ask {model.name}", lambda model=model: main(["ask", str(model), QUESTION, "--max-tokens", "4"]))
    form = read_prompt_file(export / "coca_prompt.json").form
    assert form.instructions == {"factual": instruction}
    bare = [{"role": "user", "content": QUESTION}]
    write_rows(tmp_path / "asked.jsonl", [ROW | {"id": "1"}])

    def collect(url, output):
        options = {"--model": "small", "--data": tmp_path / "asked.jsonl", "--form": export, "--max-tokens": 4}
        more = [str(each) for pair in options.items() for each in pair]
        assert main(["collect", url, "--output", str(tmp_path / output), *more]) == 0

    with serve(monkeypatch, "--model", export, "--name", "small") as url:
        sampled("serve", lambda: post(url, bare))
        sampled("collect from serve", lambda: collect(url, "a"))
    with serve(monkeypatch, "--model", export, "--name", "small", "--raw-prompts") as url:
        sampled("collect", lambda: collect(url, "b"))
        sampled("OpenCompass", lambda: post(url, opencompass_messages(form)))
        tier = {"name": "t", "backend": "b", "form": str(export), "bands": [{"at_least": 0, "action": "answer"}]}
        backend = {"url": url, "model": "small", "dialect": "vllm"}
        config = ServingConfig.model_validate({"name": "small", "backends": {"b": backend}, "tiers": [tier]})
        proxy = Proxy(config, {})
        with served_in_background(proxy.app(), proxy.shutdown) as routed:
            sampled("tier", lambda: post(routed, bare))
            sampled("collect from a tier", lambda: collect(routed, "c"))
    code = re.findall(r"```python\n(.*?)```", (export / "README.md").read_text(), re.DOTALL)[1]
    monkeypatch.chdir(export)
    names = {}
    exec(code.replace("What is 6 x 7?", QUESTION), names)  # noqa: S102 - written by our own command
    found["card"] = names["prompt"]["input_ids"][0].tolist()
    assert {name: tokens == found["training"] for name, tokens in found.items()} == dict.fromkeys(found, True)
    assert len(found) == 11
    # Validation and collecting name the same form.
    rows = [json.loads(line) for line in (tmp_path / "b" / "responses.jsonl").read_text().splitlines()]
    digests = form.digests()
    assert {p.form for p in read_predictions(run / "predictions_after.jsonl")} == {digests["factual"]}
    assert {row["form"] for row in rows} == {digests["factual"]}
