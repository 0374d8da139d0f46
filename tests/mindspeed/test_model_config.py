"""The model of ``config.json`` is the one that Megatron builds: published configurations, and each change of one."""

import functools
import json

import pytest

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.mindspeed.keys import translate
from coca_mindspeed.mindspeed.model_config import FAMILIES, compare_model
from coca_mindspeed.mindspeed.plan import make_plan
from tests.mindspeed.builders import write
from tests.tables import EVERY, check_rows, read_table

QWEN25 = {
    **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "attention_dropout": 0.0},
    **{"bos_token_id": 151643, "eos_token_id": 151645, "initializer_range": 0.02, "max_position_embeddings": 32768},
    **{"rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "transformers_version": "4.43.1"},
    **{"use_cache": True, "use_sliding_window": False, "sliding_window": 32768},
}
LLAMA3 = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False},
    **{"attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128009, "initializer_range": 0.02},
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
    **{"num_key_value_heads": 8, "max_position_embeddings": 8192, "pretraining_tp": 1, "rms_norm_eps": 1e-05},
    **{"rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    **{"transformers_version": "4.40.0.dev0", "use_cache": True, "vocab_size": 128256},
}
LLAMA3_SCALING = {
    **{"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
    **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
}
#: By the model of a run: its config.json as published.
PUBLISHED = {
    "qwen25_1p5b": {
        **QWEN25,
        **{"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_hidden_layers": 28},
        **{"num_key_value_heads": 2, "max_window_layers": 21, "tie_word_embeddings": True, "vocab_size": 151936},
    },
    "qwen25_3b": {
        **QWEN25,
        **{"hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_hidden_layers": 36},
        **{"num_key_value_heads": 2, "max_window_layers": 70, "tie_word_embeddings": True, "vocab_size": 151936},
    },
    "qwen25_7b": {
        **QWEN25,
        **{"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28},
        **{"num_key_value_heads": 4, "max_window_layers": 28, "tie_word_embeddings": False, "vocab_size": 152064},
        **{"sliding_window": 131072},
    },
    "llama3_8b": LLAMA3,
    "llama31_8b": {
        **LLAMA3,
        **{"rope_scaling": LLAMA3_SCALING, "max_position_embeddings": 131072, "mlp_bias": False},
        **{"eos_token_id": [128001, 128008, 128009], "transformers_version": "4.42.3"},
    },
    "qwen3_8b": {
        **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False},
        **{"attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128},
        **{"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36},
        **{"num_key_value_heads": 8, "max_position_embeddings": 40960, "max_window_layers": 36, "rms_norm_eps": 1e-06},
        **{"rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False},
        **{"torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936},
    },
}


@functools.cache
def composed(model, *overrides):
    typed = (f"model={model}", *overrides) if model == "llama31_8b" else overrides
    return compose_run(f"{model.replace('llama31', 'llama3')}_910b", typed).run


def run_of(model, directory):
    run = composed(model)
    return run.model_copy(update={"model": run.model.model_copy(update={"path": str(directory)})})


def write_published(directory, model, changes):
    """``changes`` of its config.json; a key that ends in - is left out."""
    absent = {key.removesuffix("-") for key in changes if key.endswith("-")}
    config = {
        key: value for key, value in {**PUBLISHED[model], **changes}.items() if key.removesuffix("-") not in absent
    }
    write(directory / "config.json", json.dumps(config))


@pytest.mark.parametrize("every", EVERY)
def test_changes_of_published_models(tmp_path, every):
    def check(model, overrides, changes, expected):
        write_published(tmp_path, model, json.loads(changes))
        found = compare_model(str(tmp_path), translate(composed(model, *overrides.split())))
        keys = [problem.key.removeprefix("config.json: ") for problem in found.problems]
        assert keys == expected.split()
        assert {problem.code for problem in found.problems} <= {"model"}

    check_rows(check, read_table(__file__, "model_configs.tsv")[::every])


def test_the_check_of_a_start_compares_it(tmp_path):
    write_published(tmp_path, "llama3_8b", {})
    run = run_of("llama3_8b", tmp_path)
    assert [problem.code for problem in make_plan(run).problems] == []
    write_published(tmp_path, "llama31_8b", {})
    assert [(p.code, p.key) for p in make_plan(run).problems] == [("model", "config.json: rope_scaling")]
    assert make_plan(run_of("llama31_8b", tmp_path)).problems == ()


@pytest.mark.parametrize("text", ["{", "[1]", "null"])
def test_a_damaged_file_is_refused(tmp_path, text):
    write(tmp_path / "config.json", text)
    assert [problem.code for problem in make_plan(run_of("llama3_8b", tmp_path)).problems] == ["model"]


def test_keys_without_effect_are_named_in_the_plan(tmp_path):
    write_published(tmp_path, "qwen25_7b", {"note": 1, "unsloth_version": "1", "_commit_hash": "a", "id2label": {}})
    plan = make_plan(run_of("qwen25_7b", tmp_path))
    (note,) = (note for note in plan.notes if "config.json" in note)
    assert note.endswith(": note")
    window = {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 28}
    write_published(tmp_path, "qwen25_7b", window)
    assert any("max_window_layers" in note for note in make_plan(run_of("qwen25_7b", tmp_path)).notes)


@pytest.mark.parametrize("kind", FAMILIES)
def test_an_absent_key_has_transformers_default(kind):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind)
    for key, value in FAMILIES[kind]["defaults"].items():
        known = {"head_dim": [value, 4096 // 32], "num_key_value_heads": [value, 32]}  # null: by the other sizes
        known |= {"sliding_window": [None], "layer_types": [["full_attention"] * 32]}  # off, and derived
        assert getattr(config, key, value) in known.get(key, [value]), key


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_key_that_transformers_writes_is_known(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    everything = transformers.AutoConfig.for_model(kind).to_dict()
    write(tmp_path / "config.json", json.dumps(everything))
    assert compare_model(str(tmp_path), translate(composed("qwen25_7b"))).notes == []
