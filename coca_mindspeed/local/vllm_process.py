"""The process that holds vLLM: told weights and prompts, it answers with tokens and their log-probs.

It runs in the Python of an environment that has vLLM, which need not have this package nor what it depends on: this
module imports torch, vLLM and the standard library, and of ours what needs no more than these.
"""

from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from coca_mindspeed.grading.programs.inside.lifeline import end_with_writer
from coca_mindspeed.local.vllm_wire import receive, send


def main(connection: int, lifeline: int) -> None:
    """Answer over the socket ``connection`` until it is closed; end with the writer of the pipe ``lifeline``.

    Both are file descriptors.
    """
    end_with_writer(lifeline)
    trainer = Connection(connection)
    try:
        _serve(trainer)
    except EOFError:
        return
    except Exception as error:
        send(trainer, {"error": f"{type(error).__name__}: {error}"})
        raise


def _serve(trainer: Connection) -> None:
    settings, _ = receive(trainer)
    engine = Engine(settings)
    send(trainer, {"ready": True})
    while True:
        order, tensors = receive(trainer)
        if order["order"] == "load":
            engine.load(_weights(trainer))
            send(trainer, {"loaded": True})
        elif order["order"] == "sample":
            send(trainer, {"sampled": True}, engine.sample(order, *tensors))
        else:
            raise ValueError(f"no such order: {order['order']!r}")


def _weights(trainer: Connection) -> Iterator[tuple[str, Tensor]]:
    """Names and weights as they arrive, so that only what vLLM keeps of them is ever held."""
    while True:
        message, tensors = receive(trainer)
        if message["name"] is None:
            return
        yield message["name"], tensors[0]


class Engine:
    """VLLM in this process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Build the model of a directory's ``config.json``, with weights that mean nothing yet."""
        from vllm import LLM

        optional = {} if settings["max_num_seqs"] is None else {"max_num_seqs": settings["max_num_seqs"]}
        self._llm = LLM(
            model=settings["model"],
            skip_tokenizer_init=True,
            trust_remote_code=settings["trust_remote_code"],
            load_format="dummy",
            dtype=settings["dtype"],
            max_model_len=settings["max_model_len"],
            kv_cache_memory_bytes=settings["kv_cache_bytes"],
            # With the cache's size given, this is only what has to be free at the start, beside the trainer.
            gpu_memory_utilization=0.01,
            enforce_eager=settings["eager"],
            generation_config="vllm",  # the model's own would bring a top-k and a top-p of its authors
            logprobs_mode="processed_logprobs",  # of the distribution that is drawn from, temperature included
            seed=0,
            **optional,
        )

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Put these weights, named as in a checkpoint, in the place of those that are there.

        By vLLM's own reload: it packs weights anew for the kernels that use a packed copy, as those for CPUs do.
        """
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if next(weights, None) is not None:
            raise RuntimeError("vLLM has not taken all of the weights")
        self._llm.apply_model(_pack_again)
        # Keys and values of the old weights must not meet queries of the new ones.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM has not emptied its prefix cache")

    def sample(
        self, order: dict[str, Any], prompts: Tensor, prompt_lengths: Tensor, seeds: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One response for each seed; as many seeds follow each prompt as there are seeds for a prompt.

        Args:
            order: ``max_tokens``, ``temperature``, ``stop`` (token ids) and ``never`` (a token id or None).
            prompts: int64, all prompts' tokens in a row.
            prompt_lengths: int64 ``[P]``.
            seeds: int64 ``[P * G]``.

        Returns:
            All responses' tokens in a row (int64), their log-probs (float32), and each response's length (int64).
        """
        from vllm import SamplingParams

        each = [tokens.tolist() for tokens in prompts.split(prompt_lengths.tolist())]
        group = len(seeds) // len(each)
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in each for _ in range(group)],
            [
                SamplingParams(
                    temperature=order["temperature"],
                    max_tokens=order["max_tokens"],
                    seed=seed,
                    stop_token_ids=order["stop"],
                    ignore_eos=True,  # all of them are among those above
                    logit_bias=None if order["never"] is None else {order["never"]: float("-inf")},
                    logprobs=0,  # of the sampled token alone
                    flat_logprobs=True,
                    detokenize=False,
                )
                for seed in seeds.tolist()
            ],
            use_tqdm=False,
        )
        responses = [output.outputs[0] for output in outputs]
        return _flat(responses)


def _pack_again(model: torch.nn.Module) -> None:
    """Renew packed copies that were made of weights which are still there unpacked: those of embeddings and heads.

    vLLM's reload passes over a head that is tied to its embedding (0.32: "ParallelLMHead: Failed to load weights"), and
    on a CPU that head would go on computing with the copy of the weights that were there before.
    """
    layer: Any  # vLLM's layers have what torch's do not
    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and layer.weight.numel():
            layer.quant_method.process_weights_after_loading(layer)


def _flat(responses: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    tokens: list[int] = []
    log_probs: list[float] = []
    for response in responses:
        tokens += response.token_ids
        log_probs += response.logprobs.logprobs
        if len(tokens) != len(log_probs):
            raise RuntimeError("vLLM has not given one log-prob for each token")
    lengths = torch.tensor([len(response.token_ids) for response in responses])
    return torch.tensor(tokens), torch.tensor(log_probs, dtype=torch.float32), lengths
