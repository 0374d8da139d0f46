"""Files of a model of one's own that would end a run later, or change its prompts: found at the start."""

import datetime
import errno
import json
import re
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, __version__

from coca_mindspeed.algorithm.parsing import SYSTEM_PROMPTS
from coca_mindspeed.cli import main
from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.data.prompts import prompt_messages, render_chat, render_prompts, write_into_template
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, TrainingError
from coca_mindspeed.local import logging as run_log
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.model_files import check_template_file, load_model_tokenizer, weight_shapes
from coca_mindspeed.local.prompt_checks import LengthLimits, ordinary_pad_token
from coca_mindspeed.local.run_directory import list_checkpoints
from coca_mindspeed.local.tiny_model import write_tiny_model
from coca_mindspeed.utils.directories import MARKER
from tests import tokenizers_for_tests as kinds
from tests.local.models_for_tests import check_model, set_config, write_random_model
from tests.local.runs_for_tests import arguments, small_session, write_rows

CLOCK = "{{ strftime_now('%d %b %Y') }}. " + kinds.QWEN_TEMPLATE
THINKING = kinds.QWEN_TEMPLATE + (
    "{%- if add_generation_prompt %}{{ '<think>\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
RECORD = Record("1", "d", "math", "What is 1 + 1?", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("models") / "model", "qwen2")


def with_template(model, directory, template):
    path = set_config(model, directory)
    (path / "chat_template.jinja").write_text(template)
    return path


def rendered(path, **variables):
    messages = prompt_messages(RECORD, SYSTEM_PROMPTS["first"])
    return render_chat(AutoTokenizer.from_pretrained(path), messages, **variables)


def without_template(model, directory, how):
    path = set_config(model, directory)
    (path / "chat_template.jinja").unlink(missing_ok=True)
    file = path / "tokenizer_config.json"
    own = {"chat_template": "{{ messages[-1].content }}"} if how == "in the configuration" else {}
    kept = {key: value for key, value in json.loads(file.read_text()).items() if key != "chat_template"}
    file.write_text("{" if how == "broken configuration" else json.dumps({**kept, **own}))
    if how in ("file", "additional file"):
        folder = path / ("additional_chat_templates" if how == "additional file" else "")
        folder.mkdir(exist_ok=True)
        (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    if how == "no configuration":
        file.unlink()
    return path


@pytest.mark.parametrize(
    ("how", "custom_code", "refused"),
    [
        ("nowhere", False, True),
        ("nowhere", True, False),  # the code may set it
        ("file", False, False),
        ("additional file", False, False),
        ("in the configuration", False, False),
        ("no configuration", False, False),  # the tokenizer cannot be loaded either, which says more
        ("broken configuration", False, False),
    ],
)
def test_a_missing_template_is_found_in_the_files(tmp_path, model, how, custom_code, refused):
    path = without_template(model, tmp_path / "model", how)
    config = ModelConfig(path=str(path), trust_remote_code=custom_code)
    with pytest.raises(ConfigError) if refused else nullcontext() as caught:
        check_template_file(path, config)
    if refused:
        assert [(problem.code, problem.key) for problem in caught.value.problems] == [
            ("no-chat-template", "model.path")
        ]


def test_a_tokenizer_without_a_template_is_refused_wherever_it_comes_from(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError) as caught:
        write_into_template(tokenizer, {})
    assert [problem.code for problem in caught.value.problems] == ["no-chat-template"]


@pytest.mark.parametrize(
    ("answers", "warned"),
    [
        (["1" * 8, "2"], False),
        (["1" * 9, "2" * 12, "3"], True),  # this tokenizer has a token for each digit
    ],
)
def test_gold_answers_that_no_response_can_give_are_named(tmp_path, model, capsys, answers, warned):
    rows = [{"id": f"r{i}", "question": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
    write_rows(tmp_path / "train.jsonl", rows)
    assert main(arguments(tmp_path, model)) == 0  # rollout.max_new_tokens=8
    lines = [line for line in capsys.readouterr().err.splitlines() if "[long-answers]" in line]
    assert len(lines) == warned
    for part in ("2 gold answers", "r1", " 12 ") if warned else ():
        assert part in lines[0]


def test_variables_are_in_the_template_that_is_saved_with_the_trained_model(tmp_path, model):
    path = with_template(model, tmp_path / "model", THINKING)
    assert main(arguments(tmp_path, path, "model.chat_template_kwargs={enable_thinking: false}")) == 0
    assert rendered(tmp_path / "run" / "model") == rendered(path, enable_thinking=False) != rendered(path)
    check_model(path, ModelConfig(), [RECORD], SYSTEM_PROMPTS["first"], LengthLimits(400, 8), thinking=True)


def on(day, monkeypatch):
    """Let a run start on such a day."""
    clock = SimpleNamespace(date=SimpleNamespace(today=lambda: datetime.date.fromisoformat(day)))
    monkeypatch.setattr("coca_mindspeed.local.run.datetime", clock)


@pytest.mark.parametrize(
    ("interval", "lora"), [(1, ()), (0, ()), (1, ("model.lora.rank=2",))], ids=["checkpoint", "model", "adapters"]
)
def test_a_run_that_is_resumed_on_another_day_asks_with_its_first_date(tmp_path, model, monkeypatch, interval, lora):
    if lora:
        pytest.importorskip("peft")
    path = with_template(model, tmp_path / "model", CLOCK)
    on("2024-07-05", monkeypatch)
    assert main(arguments(tmp_path, path, "trainer.steps=1", f"checkpoint.interval={interval}", *lora)) == 0
    marker = json.loads((tmp_path / "run" / MARKER).read_text())
    assert marker["settings"]["model"]["prompt_date"] == "2024-07-05"
    if not interval:  # as a run that was killed before its first checkpoint leaves it
        for checkpoint in list_checkpoints(tmp_path / "run" / "checkpoints"):
            (checkpoint.path).rename(tmp_path / checkpoint.path.name)
    on("2024-07-06", monkeypatch)
    more = ("trainer.steps=2", f"checkpoint.interval={interval}", *lora, "--resume")
    assert main(arguments(tmp_path, path, *more)) == 0
    resumed = json.loads((tmp_path / "run" / MARKER).read_text())
    assert {**resumed, "settings": marker["settings"]} == marker
    assert resumed["settings"]["model"] == marker["settings"]["model"]
    assert rendered(tmp_path / "run" / "model").startswith("05 Jul 2024.")
    # A new run from the trained model keeps what that was trained on.
    again = tmp_path / "again"
    again.mkdir()
    assert main(arguments(again, tmp_path / "run" / "model")) == 0
    assert rendered(again / "run" / "model").startswith("05 Jul 2024.")


def test_a_run_is_not_resumed_with_other_prompts(tmp_path, model, capsys):
    assert main(arguments(tmp_path, model, "checkpoint.interval=1")) == 0
    [checkpoint] = list_checkpoints(tmp_path / "run" / "checkpoints")
    template = checkpoint.model / "chat_template.jinja"
    template.write_text("New. " + template.read_text())
    capsys.readouterr()
    assert main(arguments(tmp_path, model, "trainer.steps=2", "--resume")) == 1
    assert "first_prompt_sha256" in capsys.readouterr().err
    # A run of a release that noted no prompt goes on.
    marker = tmp_path / "run" / MARKER
    values = json.loads(marker.read_text())
    marker.write_text(json.dumps({**values, "first_prompt_sha256": None}))
    assert main(arguments(tmp_path, model, "trainer.steps=2", "--resume")) == 0


def set_generation(path, **values):
    file = path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return path


@pytest.mark.skipif(not __version__.startswith("4."), reason="transformers 5 reads rope_parameters")
@pytest.mark.parametrize(
    ("parameters", "changed", "ignored"),
    [
        ({"rope_theta": 50_000.0, "rope_type": "default"}, {}, True),
        ({"rope_theta": 10_000.0, "rope_type": "default"}, {}, False),  # what transformers 4 assumes
        (
            {"rope_theta": 10_000.0, "rope_type": "linear", "factor": 2.0},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            False,
        ),
    ],
)
def test_rotary_frequencies_that_transformers_5_wrote_are_not_ignored(tmp_path, model, parameters, changed, ignored):
    path = set_config(model, tmp_path / "model", rope_parameters=parameters, **changed)
    config = json.loads((path / "config.json").read_text())
    del config["rope_theta"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="--model=") if ignored else nullcontext():  # as served and evaluated
        load_policy(path, ModelConfig(), torch.device("cpu"), where="--model")


def test_an_exported_model_names_the_end_tokens_of_its_training(tmp_path, model):
    """The tokenizer's own is missing in the generation config of the model."""
    path = set_generation(set_config(model, tmp_path / "model"), eos_token_id=5)
    policy = load_policy(path, ModelConfig(), torch.device("cpu"))
    assert policy.end_of_turn == policy.tokenizer.eos_token_id != 5
    assert main(arguments(tmp_path, path)) == 0
    exported = json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text())
    assert exported["eos_token_id"] == list(policy.eos_ids) == [5, policy.end_of_turn]


def add_token(path, token, **named):
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = json.loads((path / "config.json").read_text())["vocab_size"]
    fill = [f"<fill_{n}>" for n in range(rows - len(tokenizer))]
    tokenizer.add_tokens([*fill, token], special_tokens=True)
    for name, value in named.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(path)
    return path


def test_a_token_without_a_row_is_no_obstacle_until_a_prompt_holds_it(tmp_path, model):
    """Gemma 3's text models have an image token more than rows."""
    path = add_token(set_config(model, tmp_path / "model"), "<image>")
    limits = LengthLimits(400, 8)
    check_model(path, ModelConfig(), [RECORD], SYSTEM_PROMPTS["first"], limits)
    asked = Record("2", "d", "math", "What is <image>?", "2")
    with pytest.raises(ConfigError, match=r"(?s)'<image>'.*'2' of 'd' .*resize_token_embeddings"):
        check_model(path, ModelConfig(), [RECORD, asked], SYSTEM_PROMPTS["first"], limits)


@pytest.mark.parametrize(
    ("tokenizer", "pad", "end", "ordinary"),
    [
        (kinds.qwen_like, "<|endoftext|>", None, False),
        (kinds.qwen_like, "<|im_end|>", None, False),
        (kinds.qwen_like, "!", None, True),
        (kinds.llama3_like, None, None, False),
        (kinds.sentence_piece_like, "<unk>", None, False),
        (kinds.sentence_piece_like, "0", None, True),
        (kinds.character_level, ".", None, True),
        (kinds.character_level, ".", ".", False),  # the policy writes it at its end
    ],
)
def test_padding_by_ordinary_text_is_found(tmp_path, tokenizer, pad, end, ordinary):
    tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    loaded.pad_token, loaded.eos_token = pad, end or loaded.eos_token
    loaded.save_pretrained(tmp_path)
    assert ordinary_pad_token(AutoTokenizer.from_pretrained(tmp_path)) == (pad if ordinary else None)


@pytest.mark.parametrize(
    ("log", "step", "function", "written"),
    [("metrics.jsonl", 2, "to_json_line", 2), ("samples", 4, "write_json_lines", 3)],
)
def test_a_full_disk_names_file_step_checkpoint_and_how_to_go_on(tmp_path, monkeypatch, log, step, function, written):
    calls, original = [], getattr(run_log, function)

    def full(*arguments):
        calls.append(arguments)
        if len(calls) > written:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments)

    monkeypatch.setattr(run_log, function, full)
    session = small_session(tmp_path / "run", "logging.samples_interval=1")
    with closing(session), pytest.raises(TrainingError, match=rf"step {step}: .*/run/{log}.*No space left") as stopped:
        session.trainer.run()
    assert ("--resume" in str(stopped.value)) == ("checkpoints/step_000002" in str(stopped.value)) == (step > 2)


def test_a_damaged_weight_file_is_named(tmp_path):
    path = tmp_path / "step_000004" / "model" / "model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"cut off")
    with pytest.raises(ConfigError, match=r"step_000004/model/model\.safetensors: damaged"):
        weight_shapes(path.parent)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("own", [True, False], ids=["own head", "same head"])
def test_a_head_that_tying_would_drop_is_refused(tmp_path, model, file, own):
    """An untied model whose config.json says that it is tied."""
    path = set_config(model, tmp_path / "tied", tie_word_embeddings=True)
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + own
    (path / "model.safetensors").unlink()
    save = torch.save if file.endswith(".bin") else partial(save_file, metadata={"format": "pt"})
    save(weights, path / file)
    if own:
        with pytest.raises(ConfigError, match=r"model\.path=.*lm_head\.weight.*tie_word_embeddings: false"):
            load_policy(path, ModelConfig(), torch.device("cpu"))
        path = set_config(path, tmp_path / "untied", tie_word_embeddings=False)
    load_policy(path, ModelConfig(), torch.device("cpu"))


def test_the_documented_lines_mend_such_a_template(tmp_path, model):
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    lines = re.search(r"```jinja\n(.*?)```", page, re.DOTALL)[1]
    path = set_config(model, tmp_path / "gemma")
    loop = "{%- for m in turns -%}<{{ m.role }}>{{ m.content }}{%- endfor -%}"
    (path / "chat_template.jinja").write_text(lines + loop)
    tokenizer = load_model_tokenizer(path, ModelConfig())
    record = Record("1", "d", "math", "1+1?", "2", metadata={"instruction": ""})
    assert render_prompts(tokenizer, [record], "Say it.") == ["<user>Say it.\n\n1+1?"]
    assert render_prompts(tokenizer, [record], None) == ["<user>1+1?"]


def test_generate_takes_what_the_saved_tokenizer_returns(tmp_path):
    write_tiny_model(tmp_path, seed=0)
    # A trained model is saved with the tokenizer as it was loaded.
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    inputs = tokenizer(["1+2=", "12+34="], padding=True, return_tensors="pt")
    assert set(inputs) == {"input_ids", "attention_mask"}
    generated = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert generated.shape[0] == 2
    assert torch.equal(generated[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])
