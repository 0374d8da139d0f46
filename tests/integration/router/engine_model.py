"""The demo's model in a form that vLLM's kernels for CPUs can compute: the same function with heads of 32.

Those kernels know heads of 32 and more, the demo's have 16.  Zeros beside the 16 change nothing, once the scale of the
attention scores (1 / sqrt of the head's size) and the rotation's frequencies are set right.  vLLM's Qwen2 takes the
size of a head from the hidden size, so the result is written as a Llama: the same network, once it is given biases.
"""

import json
import math
import shutil

import torch
from safetensors.torch import load_file, save_file

HEAD = 32


def widen_heads(source, target, *, context):
    """Write the Qwen2 model of a directory as a Llama with heads of :data:`HEAD` and room for ``context`` tokens."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "config.json":
            shutil.copy(path, target / path.name)
    config = json.loads((source / "config.json").read_text())
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    narrow = hidden // heads
    assert config["num_key_value_heads"] == heads
    assert HEAD % narrow == 0
    widening = HEAD // narrow
    # Llama rotates dimension i with i + size / 2, so each half of a head goes to the start of a half.
    halves = torch.arange(HEAD).reshape(2, HEAD // 2)[:, : narrow // 2].flatten()
    places = (torch.arange(heads)[:, None] * HEAD + halves).flatten()
    weights = load_file(source / "model.safetensors")
    for name in [name for name in weights if "self_attn" in name]:
        value = weights[name]
        if name.endswith("o_proj.weight"):
            weights[name] = torch.zeros(hidden, heads * HEAD).index_copy(1, places, value)
            weights[name.replace("weight", "bias")] = torch.zeros(hidden)
            continue
        scale = math.sqrt(widening) if "q_proj" in name else 1.0
        weights[name] = torch.zeros(heads * HEAD, *value.shape[1:]).index_copy(0, places, value * scale)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    kept = ["bos_token_id", "eos_token_id", "pad_token_id", "hidden_act", "hidden_size", "intermediate_size"]
    kept += ["vocab_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps"]
    kept += ["tie_word_embeddings"]
    changed = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "head_dim": HEAD,
        # Frequency i of n is theta^(-i / n): twice the frequencies need the square of theta.
        "rope_theta": config["rope_theta"] ** widening,
        "max_position_embeddings": context,
        "torch_dtype": "float32",
    }
    (target / "config.json").write_text(json.dumps({k: config[k] for k in kept if k in config} | changed, indent=1))
