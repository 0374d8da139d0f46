"""Write the change of a training in a model's linear layers as a LoRA adapter of few bytes.

``python -m experiments.smollm2.adapter EXPORT BASE RECORDS ADAPTER --rank R`` writes it in peft's format, bfloat16,
with the form of the prompts.  Each layer gets the matrix of rank R whose outputs differ least from those of the
training's change, in squares over the layer's inputs on RECORDS (Eckart and Young).  Embeddings and norms stay those of
the base.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coca_mindspeed.algorithm.parsing import ResponseFormat
from coca_mindspeed.cli.options import at_least
from coca_mindspeed.config.prompt_form import PROMPT_FILE, read_prompt_file
from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.prefill import common_prefix_length
from coca_mindspeed.local.sft import encode_responses
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.progress import StepProgress

_LINEAR = "_proj"
_TEXTS = 256  # at most, of RECORDS
_RIDGE = 1e-3  # of the mean square of an input, for directions that RECORDS do not have


def low_rank(difference: Tensor, moment: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """Factors ``A [rank, in]`` and ``B [out, rank]`` that change outputs most nearly as ``difference [out, in]`` does.

    ``moment [in, in]`` is the second moment of the inputs; float64.  Also returns the share of the squared change of
    the outputs that they keep.
    """
    root = torch.linalg.cholesky(moment + _RIDGE * moment.diagonal().mean() * torch.eye(len(moment)).to(moment))
    left, sizes, right = torch.linalg.svd(difference.double() @ root, full_matrices=False)
    roots = sizes[:rank].sqrt()
    first = torch.linalg.solve_triangular(root, roots[:, None] * right[:rank], upper=False, left=False)
    return first, left[:, :rank] * roots, float(sizes[:rank].square().sum() / sizes.square().sum())


def input_moments(model: Any, texts: Sequence[list[int]]) -> dict[str, Tensor]:
    """The second moment ``[in, in]`` of the inputs of each linear layer, float64.

    A prefix of all texts, as of :func:`.common_prefix_length`, counts once.
    """
    shared, moments = common_prefix_length(texts), dict[str, Tensor]()
    skipped = 0

    def add(name: str, inputs: tuple[Tensor]) -> None:
        own = inputs[0][0, skipped:].double()
        moments[name] = moments.get(name, 0.0) + own.T @ own

    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: add(name, inputs))
        for name, layer in model.named_modules()
        if name.endswith(_LINEAR)
    ]
    with torch.no_grad(), StepProgress(len(texts), True, title="texts") as bar:
        for done, text in enumerate(texts, 1):
            model(torch.tensor([text]))
            skipped = shared
            bar.show(done)
    for hook in hooks:
        hook.remove()
    return moments


def response_texts(
    policy: Policy, records: Sequence[Record], system_prompt: str | None, decimals: int
) -> list[list[int]]:
    """Token ids of prompts with right answers, behind confidences spread from 0 to 1."""
    written = ResponseFormat("first", decimals, spaced=True)
    responses = [written.response(record.answer, (i * 37 % 101) / 100) for i, record in enumerate(records)]
    prompts = policy.encode_prompts(records, system_prompt)
    return [[*prompt, *own] for prompt, own in zip(prompts, encode_responses(policy, responses), strict=True)]


def write_adapter(export: Path, base: Path, records: Sequence[Record], adapter: Path, rank: int) -> float:
    """Write the adapter of an exported model and its base; return the mean share of :func:`low_rank`."""
    from peft import LoraConfig

    form = read_prompt_file(export / PROMPT_FILE).form
    policy = load_policy(export, ModelConfig(compute_dtype="float32"), torch.device("cpu"))
    texts = response_texts(policy, records, form.system_prompt, form.decimals or 2)
    before = load_file(base / "model.safetensors")
    weights, shares = dict[str, Tensor](), []
    moments = input_moments(policy.model, texts)
    with StepProgress(len(moments), True, title="layers") as bar:
        for name, moment in moments.items():
            difference = policy.model.get_submodule(name).weight.detach().double() - before[f"{name}.weight"].double()
            *factors, share = low_rank(difference, moment, rank)
            shares.append(share)
            for letter, factor in zip("AB", factors, strict=True):
                weights[f"base_model.model.{name}.lora_{letter}.weight"] = factor.to(torch.bfloat16).contiguous()
            bar.show(len(shares))
    layers = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in weights})
    adapter.mkdir(parents=True, exist_ok=True)
    LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=rank, target_modules=layers).save_pretrained(str(adapter))
    save_file(weights, adapter / "adapter_model.safetensors")
    shutil.copyfile(export / PROMPT_FILE, adapter / PROMPT_FILE)
    return sum(shares) / len(shares)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.smollm2.adapter", description=__doc__)
    for name in ("export", "base", "records", "adapter"):
        parser.add_argument(name, type=Path, metavar=name.upper())
    parser.add_argument("--rank", type=at_least(1), required=True, metavar="R")
    given = parser.parse_args()
    records = list(read_records(given.records))
    records = records[:: -(-len(records) // _TEXTS)]  # a file has its kinds of questions one after the other
    share = write_adapter(given.export, given.base, records, given.adapter, given.rank)
    size = (given.adapter / "adapter_model.safetensors").stat().st_size
    print_text(f"{given.adapter}: {size / 1e6:.1f} MB, {share:.1%} of the squared change")


if __name__ == "__main__":
    main()
