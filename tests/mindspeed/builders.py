"""Files, checkpoints, configurations and the transfer dock of MindSpeed-RL for tests."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.mindspeed.stages import advantage_task, dock, reward_worker

#: A file in MindSpeed-RL's own layout, as its ``configs/grpo_*.yaml``.
NATIVE = """model:
  qwen25_7b: {use_mcore_models: true, num_layers: 28, hidden_size: 3584, ffn_hidden_size: 18944,
    num_attention_heads: 28, rotary_base: 1000000, max_position_embeddings: 32768, padded_vocab_size: 152064,
    make_vocab_size_divisible_by: 1,
    untie_embeddings_and_output_weights: true, add_qkv_bias: true, group_query_attention: true, num_query_groups: 4,
    position_embedding_type: rope, normalization: RMSNorm, swiglu: true, disable_bias_linear: true}
megatron_training:
  model: qwen25_7b
  stage: ray_grpo
  tokenizer_type: PretrainedFromHF
  tokenizer_name_or_path: ./Qwen2.5-7B
  attention_dropout: 0.0
  hidden_dropout: 0.0
  data_path: ./train.jsonl
  dataset_additional_keys: [labels]
  global_batch_size: 32
  seq_length: 2048
  save_interval: 100
  train_iters: 500
  seed: 3
  bf16: true
  use_distributed_optimizer: true
  sequence_parallel: true
actor_config:
  model: qwen25_7b
  micro_batch_size: 1
  tensor_model_parallel_size: 4
  lr: 2e-6
  weight_decay: 0.01
  lr_warmup_fraction: 0.0
  adam_beta2: 0.98
  load: ./weights
  save: ./ckpt
rl_config:
  gamma: 1.0
  lam: 0.95
  adv_estimator: group_norm
  kl_penalty: low_var_kl
  init_kl_coef: 0.0
  mini_batch_size: 16
  max_prompt_length: 2048
  n_samples_per_prompt: 8
  verifier_function: [math_17k_acc]
  actor_resource: {num_npus: 16}
generate_config:
  offload_train_optimizer: true
  offload_train_grad: true
  offload_train_param: true
  infer_tensor_parallel_size: 1
  max_num_seqs: 64
  max_model_len: 4096
  max_num_batched_tokens: 8192
  gpu_memory_utilization: 0.6
  sampling_config: {temperature: 1.0, max_tokens: 2048, top_p: 1.0, top_k: -1}
"""


def write(path: Path | str, text: str = "") -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def model_config(run: RunConfig, **changes: Any) -> str:
    """``config.json`` of the model that a run trains, with ``changes``."""
    shape = run.model.architecture
    assert shape is not None
    scaling = shape.rope_scaling
    kind = "qwen3" if shape.qk_layernorm else "qwen2" if shape.qkv_bias else "llama"
    config = {
        **{"model_type": kind, "hidden_act": "silu", "max_position_embeddings": shape.context},
        **{"num_hidden_layers": shape.layers, "hidden_size": shape.hidden, "intermediate_size": shape.ffn},
        **{"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_groups, "vocab_size": shape.vocab},
        **{"rope_theta": shape.rope_theta, "rope_scaling": None if scaling is None else scaling.model_dump()},
        **{"rms_norm_eps": shape.norm_eps, "tie_word_embeddings": not shape.untied_embeddings},
    }
    return json.dumps(config | changes)


def checkpoint(directory: Path, tp: int, pp: int = 1, iteration: str = "release") -> Path:
    folder = "release" if iteration == "release" else f"iter_{int(iteration):07d}"
    write(directory / "latest_checkpointed_iteration.txt", iteration)
    for t in range(tp):
        for p in range(pp):
            name = f"mp_rank_{t:02d}" if pp == 1 else f"mp_rank_{t:02d}_{p:03d}"
            write(directory / folder / name / "model_optim_rng.pt")
    return directory


def mindspeed_config(**changes: Any) -> DictConfig:
    """A configuration that the hooks accept, with ``changes`` by section."""
    config: dict[str, Any] = {
        "megatron_training": {
            "stage": "ray_grpo",
            "tokenizer_type": "PretrainedFromHF",
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        },
        "actor_config": {"save": "/somewhere"},
        "rl_config": {"verifier_function": ["coca"], "n_samples_per_prompt": 4, "init_kl_coef": 0.0},
        "generate_config": {"sampling_config": {"temperature": 1.0}},
        "coca": {},
    }
    for section, values in changes.items():
        config[section] = {**config.get(section, {}), **values}
    return OmegaConf.create(config)


class FakeDock:
    """A transfer dock without Ray: rows become ready as columns are written; ``remote`` calls at once."""

    def __init__(self, rows, group, shuffle=False):
        self.data: dict[str, dict[int, Tensor]] = {}
        self.taken: dict[str, set[int]] = {}
        self.metrics: dict[str, list[float]] = {}
        self.rows, self.group, self.shuffle = rows, group, shuffle

    def __getattr__(self, name):
        return SimpleNamespace(remote=object.__getattribute__(self, f"_{name}"))

    def _get_experience(self, consumer, wanted, count, indexes=None, **_):
        taken = self.taken.setdefault(consumer, set())
        if indexes is None:
            groups = range(0, self.rows, self.group)
            starts = [g for g in (reversed(groups) if self.shuffle else groups) if g not in taken]
            ready = [
                g for g in starts if all(r in self.data.get(c, {}) for c in wanted for r in range(g, g + self.group))
            ]
            if len(ready) * self.group < count:
                return None, None
            indexes = [r for g in ready[: count // self.group] for r in range(g, g + self.group)]
        taken.update(indexes)
        return {c: [self.data[c][i] for i in indexes] for c in wanted}, indexes

    def _put_experience(self, data_dict, indexes):
        for name, rows in data_dict.items():
            assert len(rows) == len(indexes)
            assert all(row.dim() == 1 for row in rows)
            self.data.setdefault(name, {}).update(zip(indexes, rows, strict=True))

    def _all_consumed(self, consumer):
        return len(self.taken.get(consumer, ())) == self.rows

    def _update_metrics(self, value, cumulate):
        assert cumulate
        for name, values in value.items():
            self.metrics.setdefault(name, []).extend(values)


def without_ray(monkeypatch):
    """Let the reward worker and the advantage task use a :class:`FakeDock`."""

    def put(target, values, indexes):
        target.put_experience.remote(data_dict={k: list(v) for k, v in values.items()}, indexes=list(indexes))

    monkeypatch.setattr(dock, "fetch", lambda value, timeout=None: value)
    monkeypatch.setattr(dock, "unpacked", lambda batch: batch)
    monkeypatch.setattr(advantage_task, "put", put)
    monkeypatch.setattr(reward_worker, "put", put)
