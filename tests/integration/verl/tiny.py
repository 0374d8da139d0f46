"""A tiny model that verl can serve, easy arithmetic as verl's data, and a configuration for them."""

from pathlib import Path

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import WarmUpConfig
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.sft import warm_up
from tests.support import thoughts
from tests.support.verl_smoke import write_questions_for_verl, write_tiny_model_for_verl


def write_model(directory, *, method="coca", seed=0, warm_up_steps=0, thinking=False):
    """Write the tiny model, warmed up into one that answers, behind a thought or not, and is too sure of itself."""
    write_tiny_model_for_verl(directory, seed, thoughts.CHARACTERS if thinking else "")
    if not warm_up_steps:
        return
    policy = load_tiny(directory)
    records = arithmetic_records(4000, "train", seed)
    if thinking:
        records = thoughts.behind_thoughts(records)
    warm_up(policy, records, method_settings(method), WarmUpConfig(steps=warm_up_steps), seed)
    policy.model.save_pretrained(directory)


def widen_model(source, directory):
    """Write the local engine's warmed-up model with the tokens that verl wants, as unlikely as its padding."""
    write_tiny_model_for_verl(directory, seed=0)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    known, wanted = model.config.vocab_size, AutoConfig.from_pretrained(directory)
    embeddings = model.resize_token_embeddings(wanted.vocab_size, mean_resizing=False).weight
    with torch.no_grad():
        embeddings[known:] = embeddings[model.config.pad_token_id]
    model.config.pad_token_id = wanted.pad_token_id
    model.save_pretrained(directory)


def load_tiny(directory):
    """The model as the local engine sees it."""
    run = compose_run("demo", [f"model.path={directory}"]).run
    policy = load_policy(directory, run.model, torch.device("cpu"))
    policy.pad_id = policy.eos_ids[0]
    return policy


def write_questions(directory, method, *, train, evaluate, seed=0, thinking=False):
    """Write ``train.jsonl`` and ``val.jsonl`` in verl's form."""
    write_questions_for_verl(
        directory, method_settings(method, thinking=thinking), train=train, evaluate=evaluate, seed=seed
    )


def configuration(directory, run, *, gpus=1, **keys):
    """Write a YAML on verl's own defaults for the model and the questions of a directory.

    Args:
        directory: holds ``model``, ``train.jsonl`` and ``val.jsonl``.
        run: where the run goes.
        gpus: data-parallel ranks.
        keys: dotted keys with ``__`` for each dot, on top of what is here.
    """
    config = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    config["trainer"] |= {
        "n_gpus_per_node": gpus,
        "default_local_dir": str(run / "checkpoints"),
        "rollout_data_dir": str(run / "rollouts"),
        "validation_data_dir": str(run / "validation"),
    }
    config["data"] |= {"train_files": str(directory / "train.jsonl"), "val_files": str(directory / "val.jsonl")}
    config["actor_rollout_ref"]["model"]["path"] = str(directory / "model")
    config["ray_kwargs"]["ray_init"]["num_gpus"] = gpus
    for key, value in keys.items():
        *path, last = key.split("__")
        section = config
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    run.mkdir(parents=True, exist_ok=True)
    file = run / "run.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return file
