"""A tiny model, easy arithmetic, and a MindSpeed-RL configuration for them, written to a folder.

``python -m tests.integration.mindspeed.tiny DIRECTORY`` writes model and questions, and prints the overrides with which
a ready-made run for Ascend trains on them (docs/port.md).
"""

import json
import string
import sys
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig

from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import WarmUpConfig
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.data.records import write_records
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.sft import warm_up
from coca_mindspeed.local.tiny_model import EOS, tiny_config, tiny_tokenizer
from coca_mindspeed.utils.tokenization import token_text
from tests.support import thoughts

_EVEN = "#"  # one character more, for a vocabulary that two tensor-parallel ranks can share
SAMPLING = {
    "logprobs": 1,
    "max_tokens": 16,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "temperature": 1.0,
    "detokenize": False,
}
METHOD = {"confidence_decimals": 2, "advantage_eps": 0.05, "max_confidence_tokens": 6}
VOCABULARY_OF_64 = _EVEN + string.ascii_letters[:44]  # vLLM pads any other


def write_model(directory, *, seed=0, warm_up_steps=0, config=None, symbols=_EVEN, method="coca", thinking=False):
    """Write the tiny model, warmed up into one that answers and is too sure of itself; EOS also pads.

    MindSpeed-RL takes EOS for padding where the pad token's id is 0, as the tiny tokenizer's is, so both engines are
    given the tokenizer that this amounts to.

    Args:
        directory: becomes a Hugging Face directory.
        seed: of weights and warm-up.
        warm_up_steps: of imitation; 0: untrained.
        config: of another architecture; its vocabulary is that of ``symbols``.
        symbols: characters behind those that arithmetic needs.
        method: whose format the warm-up teaches.
        thinking: it teaches a thought, too.
    """
    if thinking:
        symbols += thoughts.CHARACTERS  # eight
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config or tiny_config(symbols))
    model.save_pretrained(directory)
    tokenizer = tiny_tokenizer(symbols)
    tokenizer.pad_token = EOS
    tokenizer.save_pretrained(directory)
    run = compose_run("demo", [f"model.path={directory}", f"seed={seed}"]).run
    policy = load_policy(directory, run.model, torch.device("cpu"))
    policy = Policy(
        model=policy.model,
        tokenizer=tokenizer,
        text=token_text(tokenizer, policy.model.config.vocab_size),
        eos_ids=(tokenizer.eos_token_id,),
        pad_id=tokenizer.eos_token_id,
    )
    if warm_up_steps:
        records = arithmetic_records(4000, "train", seed)
        if thinking:
            records = thoughts.behind_thoughts(records)
        warm_up(policy, records, method_settings(method), WarmUpConfig(steps=warm_up_steps), seed)
        policy.model.save_pretrained(directory)
    return policy


def llama_config(symbols=_EVEN, **changes):
    """A tiny Llama 3: output weights of its own, no biases, groups of queries."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
    }
    tokenizer = tiny_tokenizer(symbols)
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return LlamaConfig(vocab_size=len(tokenizer), **special, **{**sizes, **changes})


def llama31_config():
    """A tiny Llama 3.1, whose rotary frequencies are scaled as for 16 tokens of pre-training."""
    lengths = {"factor": 8.0, "original_max_position_embeddings": 16}
    scaling = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **lengths}
    return llama_config(rope_theta=10_000.0, rope_scaling=scaling)


def write_questions(directory, *, seed=0, train=4000, evaluate=120):
    """Write ``train.jsonl`` and ``eval.jsonl``."""
    write_records(directory / "train.jsonl", arithmetic_records(train, "train", seed))
    write_records(directory / "eval.jsonl", arithmetic_records(evaluate, "evaluate", seed))


def configuration(directory, **changes):
    """A configuration for the model in ``directory/model``; ``changes`` update whole sections key by key."""
    hf = json.loads((directory / "model" / "config.json").read_text())
    config = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    config["megatron_training"] |= {
        "tokenizer_name_or_path": str(directory / "model"),
        "data_path": str(directory / "train.jsonl"),
    }
    config["model"]["tiny"] |= {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "rotary_base": int(hf["rope_theta"]),
        "max_position_embeddings": hf["max_position_embeddings"],
        "padded_vocab_size": hf["vocab_size"],
        "untie_embeddings_and_output_weights": not hf["tie_word_embeddings"],
        "add_qkv_bias": hf["model_type"] == "qwen2",
        "qk_layernorm": hf["model_type"] == "qwen3",
        "norm_epsilon": hf["rms_norm_eps"],
    }
    if scaling := hf.get("rope_scaling"):
        names = {"rope_type": "rope_scaling_type", "factor": "rope_scaling_factor"}
        config["model"]["tiny"] |= {names.get(key, key): value for key, value in scaling.items()}
    config["actor_config"]["save"] = str(directory / "checkpoints")
    config["generate_config"]["sampling_config"] = SAMPLING
    host = {"initial_weights": str(directory / "model")}
    config["coca"] |= {"method": METHOD, "output_dir": str(directory / "output"), "host": host}
    for section, values in changes.items():
        config[section] = {**config.get(section, {}), **values}
    return config


def write_configuration(path, config):
    """Write ``config`` as YAML; returns ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def run_overrides(directory):
    """What turns a ready-made run for Ascend into one for the model and the questions in ``directory``."""
    hf = json.loads((directory / "model" / "config.json").read_text())
    architecture = {
        "layers": hf["num_hidden_layers"],
        "hidden": hf["hidden_size"],
        "heads": hf["num_attention_heads"],
        "kv_groups": hf["num_key_value_heads"],
        "ffn": hf["intermediate_size"],
        "vocab": hf["vocab_size"],
        "untied_embeddings": str(not hf["tie_word_embeddings"]).lower(),
        "rope_theta": int(hf["rope_theta"]),
        "context": hf["max_position_embeddings"],
    }
    return [
        "hardware=host",
        f"model.path={directory / 'model'}",
        *(f"model.architecture.{name}={value}" for name, value in architecture.items()),
        *(f"+model.architecture.rope_scaling.{name}={value}" for name, value in (hf.get("rope_scaling") or {}).items()),
        f"data.train={directory / 'train.jsonl'}",
        f"data.evaluate={directory / 'eval.jsonl'}",
        *("data.grader=exact", "data.grader_options={}", "data.epochs=null"),
        *("method.confidence_decimals=2", "method.max_confidence_tokens=6", "method.advantage_eps=0.05"),
        *("rollout.prompts=16", "rollout.group_size=8", "rollout.max_prompt_tokens=32", "rollout.max_new_tokens=16"),
        *("optimizer.lr=5e-4", "logging.samples_interval=1", "evaluation.interval=2", "checkpoint.interval=2"),
    ]


def padded(rows, value, multiple=2):
    """Rows as MindSpeed-RL hands them to the training engine: as wide as two ranks can share."""
    width = -(-max(map(len, rows)) // multiple) * multiple
    return torch.stack([torch.nn.functional.pad(row, (0, width - len(row)), value=value) for row in rows])


def main(directory):
    """Write model and questions, and print the overrides."""
    write_model(directory / "model", warm_up_steps=150)
    write_questions(directory)
    print(*run_overrides(directory))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
