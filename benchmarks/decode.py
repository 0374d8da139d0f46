"""``python -m benchmarks.decode``: response tokens a second on a GPU, with shared rows, CUDA graphs and transformers.

Each finished case is printed as one JSON line.  No response ends early.  ``shared`` decodes at most 64 tokens, as it
is slow; ``static`` captures its graphs in the first run (``first_s``).  ``log_prob_error`` compares the sampled
log-probs with those of the update's pass.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from benchmarks.machine import packages
from coca_mindspeed.local.attention import use_fast_attention
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.sampler import sample_responses
from coca_mindspeed.local.update import ResponseBatch

_QWEN = {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
_SMOLLM = {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
_TINY = {"vocab_size": 5000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
#: name: architecture, and its shape
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "135M": ("llama", {**_SMOLLM, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "0.5B": ("qwen2", {**_QWEN, "num_attention_heads": 14, "num_key_value_heads": 2}),
    "tiny": ("llama", {**_TINY, "num_attention_heads": 4, "num_key_value_heads": 2}),
}
_SMOLLM2 = Path(__file__).parents[1] / "models" / "smollm2"
_GROUP, _PREFIX, _SHARED_TOKENS = 8, 40, 64
_TEMPERATURE = 1.0


def policy_of(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Policy, str]:
    """The policy in float32 weights, computing in ``dtype``, and where its weights are from."""
    torch.manual_seed(0)
    weights = "random"
    if name == "135M" and (_SMOLLM2 / "model.safetensors").exists():
        model, weights = AutoModelForCausalLM.from_pretrained(_SMOLLM2, dtype=torch.float32), "smollm2"
    else:
        architecture, shape = MODELS[name]
        config = AutoConfig.for_model(architecture, tie_word_embeddings=True, max_position_embeddings=8192, **shape)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model = model.to(device).eval()
    use_fast_attention(model, device)
    never = len(model.get_output_embeddings().weight)
    return Policy(model, None, None, (never,), 0, dtype), weights


def prompts_of(policy: Policy, number: int) -> list[list[int]]:
    """Prompts of 60 to 99 tokens with a common prefix."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, policy.vocabulary, (number, 100), generator=random).tolist()
    return [[*tokens[0][:_PREFIX], *row[_PREFIX : 60 + (7 * n) % 40]] for n, row in enumerate(tokens)]


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds, device included, and the result."""
    _wait(device)
    start = time.perf_counter()
    result = work()
    _wait(device)
    return time.perf_counter() - start, result


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def decode(policy: Policy, decoding: str, rows: int, new: int) -> dict[str, float]:
    """Sample twice with one decoder; the second run is timed."""
    prompts = prompts_of(policy, rows // _GROUP)
    generator = torch.Generator(policy.device).manual_seed(0)
    policy.decoding, policy.static = decoding, None  # type: ignore[assignment]

    def work(tokens: int = new) -> Any:
        return sample_responses(
            policy, prompts, group_size=_GROUP, max_new_tokens=tokens, temperature=_TEMPERATURE, generator=generator
        )

    first, _ = timed(work if decoding == "static" else lambda: work(4), policy.device)
    seconds, samples = timed(work, policy.device)
    tokens = int(samples.lengths.sum())
    if policy.decoding != decoding:
        raise RuntimeError(f"decoded by {policy.decoding} instead")
    with torch.no_grad():
        token_ids, share = samples.token_ids[: 2 * _GROUP].to(policy.device), prompts[:2]
        expected = ResponseBatch(policy, share, token_ids, _TEMPERATURE).scores().log_probs.cpu()
    error = (samples.log_probs[: 2 * _GROUP] - expected).abs()
    return {
        "first_s": first,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "ms_per_token": 1000 * seconds / samples.token_ids.shape[1],
        "log_prob_error": float(error.max()),
        "mean_log_prob_error": float(error.mean()),
    }


def step(policy: Policy, decoding: str, rows: int, new: int) -> dict[str, float]:
    """A rollout and one update of all its responses; the second step is timed."""
    prompts = prompts_of(policy, rows // _GROUP)
    generator = torch.Generator(policy.device).manual_seed(0)
    optimizer = torch.optim.AdamW(policy.trained_parameters(), lr=1e-6, fused=True)
    policy.decoding, policy.static = decoding, None  # type: ignore[assignment]

    def work() -> float:
        seconds, samples = timed(
            lambda: sample_responses(
                policy, prompts, group_size=_GROUP, max_new_tokens=new, temperature=_TEMPERATURE, generator=generator
            ),
            policy.device,
        )
        for start in range(0, len(prompts), 4):  # microbatches
            ids = samples.token_ids[start * _GROUP : (start + 4) * _GROUP].to(policy.device)
            batch = ResponseBatch(policy, prompts[start : start + 4], ids, _TEMPERATURE)
            batch.backward(lambda log_probs: 1e-3 * log_probs.sum())
        optimizer.step()
        optimizer.zero_grad()
        return seconds

    timed(work, policy.device)
    seconds, rollout = timed(work, policy.device)
    return {"seconds": seconds, "rollout_s": rollout, "update_s": seconds - rollout}


def continuous_batching(policy: Policy, rows: int, new: int) -> dict[str, Any]:
    """Transformers' ``generate_batch`` on a copy of the model in the policy's number format."""
    from transformers.generation import ContinuousBatchingConfig

    model = copy.deepcopy(policy.model).to(policy.compute_dtype)
    model.set_attn_implementation("sdpa")
    prompts = prompts_of(policy, rows // _GROUP)
    sampling = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        num_return_sequences=_GROUP,
        max_new_tokens=new,
        eos_token_id=-1,
        pad_token_id=0,
    )
    settings = ContinuousBatchingConfig(
        max_memory_percent=0.3,
        return_logprobs=True,
        allow_block_sharing=False,
        use_cuda_graph=policy.device.type == "cuda" or None,
    )

    def work() -> Any:
        return model.generate_batch(
            inputs=prompts, generation_config=sampling, continuous_batching_config=settings, persistent_manager=True
        )

    first, _ = timed(work, policy.device)
    seconds, outputs = timed(work, policy.device)
    if any(output.error for output in outputs.values()):
        raise RuntimeError(next(output.error for output in outputs.values() if output.error))
    if hasattr(model, "destroy_cached_continuous_batching_manager"):
        model.destroy_cached_continuous_batching_manager()
    return {
        "first_s": first,
        "seconds": seconds,
        "tokens_per_s": rows * new / seconds,  # it waits for all responses, and returns one a prompt
        "ms_per_token": 1000 * seconds / new,
        "responses_returned": len(outputs),
        "attention": str(model.config._attn_implementation),
    }


def cases(models: list[str], sizes: list[tuple[int, int]]) -> Iterator[tuple[str, str, str, int, int]]:
    """Model, number format, what is measured, responses and new tokens; the most important first."""
    for model in models:
        for rows, new in sizes:
            yield model, "bfloat16", "static", rows, new
            yield model, "bfloat16", "shared", rows, min(new, _SHARED_TOKENS)
        for decoding in ("static", "shared"):
            yield model, "bfloat16", f"step {decoding}", *sizes[0]
        yield model, "float32", "static", *sizes[0]
    for model in models:
        for size in sizes:
            yield model, "bfloat16", "generate_batch", *size


def measure(policy: Policy, kind: str, rows: int, new: int) -> dict[str, Any]:
    """The figures of one case, the device's peak memory among them."""
    cuda = policy.device.type == "cuda"
    policy.static = None
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if kind == "generate_batch":
        found = continuous_batching(policy, rows, new)
    else:
        *whole, decoding = kind.split()
        found = (step if whole else decode)(policy, decoding, rows, new)
    if cuda:
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["135M", "0.5B"])
    parser.add_argument("--rows", nargs="+", type=int, default=[96, 256], help="responses (default: 96 256)")
    parser.add_argument("--tokens", nargs="+", type=int, default=[24, 256], help="new tokens (default: 24 256)")
    parser.add_argument("--only", nargs="+", help="what is measured: static, shared, 'step static', generate_batch ...")
    parser.add_argument("--seconds", type=float, default=100, help="no case starts later (default: 100)")
    arguments = parser.parse_args()
    device, start = torch.device(arguments.device), time.perf_counter()
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(json.dumps({"card": card, **packages("torch", "transformers")}), flush=True)
    sizes = [(rows, tokens) for tokens in arguments.tokens for rows in arguments.rows]
    loaded: tuple[str, Policy, str] | None = None
    for model, dtype, kind, rows, new in cases(arguments.models, sizes):
        if arguments.only and kind not in arguments.only:
            continue
        line: dict[str, Any] = {"model": model, "dtype": dtype, "what": kind, "responses": rows, "new": new}
        if time.perf_counter() - start > arguments.seconds:
            print(json.dumps({**line, "skipped": "no time left"}), flush=True)
            continue
        try:
            if loaded is None or loaded[0] != model:
                loaded = None
                loaded = (model, *policy_of(model, device, torch.float32))
            _, policy, line["weights"] = loaded
            policy.compute_dtype = getattr(torch, dtype)
            found = measure(policy, kind, rows, new)
            line |= {key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()}
        except Exception as error:  # noqa: BLE001  # one case less
            line["error"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps({**line, "at_s": round(time.perf_counter() - start, 1)}), flush=True)


if __name__ == "__main__":
    main()
