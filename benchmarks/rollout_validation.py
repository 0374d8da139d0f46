"""Compare the rollout simulator with a real decoding loop on a CPU: ``python -m benchmarks.rollout_validation``.

The loop schedules step by step and runs a Hugging Face model: batched prefill, one KV cache row per sequence, greedy
tokens, responses of given lengths.  The simulator gets the measured seconds of decoding steps by batch size and of
prefills, and predicts rollouts of mixed lengths.  Seconds are processor time of one thread, which other processes on
the machine change least.
"""

import argparse
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from benchmarks.rollout_simulator import Costs, Engine, LogNormal, Request, simulate_engine

TOLERANCE = 0.2
_PROMPT = 32
_LENGTHS = LogNormal(mean=40, sigma=0.8, longest=160)
_ROOMY = Engine(max_num_seqs=48, kv_tokens=48 * 192, block_size=16, max_num_batched_tokens=1536)
ENGINES = {
    "a slot for each response": _ROOMY,
    "16 slots": replace(_ROOMY, max_num_seqs=16),
    "16 slots, KV cache of 768 tokens": replace(_ROOMY, max_num_seqs=16, kv_tokens=768),
}


class _Rows(DynamicLayer):
    """Keys and values ``[rows, heads, tokens, size]``; each row has a length of its own."""

    def __init__(self, rows: int, tokens: int, config: LlamaConfig) -> None:
        super().__init__()
        shape = (rows, config.num_key_value_heads, tokens, config.hidden_size // config.num_attention_heads)
        self.keys, self.values, self.is_initialized = torch.zeros(shape), torch.zeros(shape), True
        self.position = torch.zeros(0, dtype=torch.int64)

    def update(self, key_states: Tensor, value_states: Tensor, *_args: object) -> tuple[Tensor, Tensor]:
        rows, width = len(self.position), int(self.position.max()) + 1
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer[torch.arange(rows), :, self.position] = states[:, :, 0]
        return self.keys[:rows, :, :width], self.values[:rows, :, :width]


class Model:
    """Sequences on a Hugging Face model.

    Attributes:
        tokens: of each sequence, its prompt first.
        rows: sequences that have a row of the KV cache, in the rows' order.
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], rows: int, longest: int) -> None:
        self._model, self.tokens, self.rows = model, [list(prompt) for prompt in prompts], list[int]()
        self._layers = [_Rows(rows, longest, model.config) for _ in range(model.config.num_hidden_layers)]

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[int]) -> None:
        """Give each sequence a row and its next token."""
        lengths = torch.tensor([len(self.tokens[i]) for i in sequences])
        ids = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.int64)  # padding stands at the end
        for row, i in enumerate(sequences):
            ids[row, : lengths[row]] = torch.tensor(self.tokens[i])
        cache = DynamicCache(config=self._model.config)
        hidden = self._model.model(ids, past_key_values=cache).last_hidden_state
        first = len(self.rows)
        for own, of_prefill in zip(self._layers, cache.layers, strict=True):
            own.keys[first : first + len(ids), :, : ids.shape[1]] = of_prefill.keys
            own.values[first : first + len(ids), :, : ids.shape[1]] = of_prefill.values
        self.rows += sequences
        self._append(sequences, hidden[torch.arange(len(ids)), lengths - 1])

    @torch.inference_mode()
    def decode(self) -> None:
        """Give each sequence that has a row its next token."""
        position = torch.tensor([len(self.tokens[i]) - 1 for i in self.rows])
        for layer in self._layers:
            layer.position = position
        hidden = self._model.model(
            torch.tensor([[self.tokens[i][-1]] for i in self.rows]),
            attention_mask=(torch.arange(int(position.max()) + 1) <= position[:, None])[:, None, None],
            position_ids=position[:, None],
            past_key_values=Cache(layers=self._layers),
            cache_position=position.max()[None],
        ).last_hidden_state
        self._append(self.rows, hidden[:, -1])

    def release(self, sequence: int) -> None:
        """Free the row of a sequence; the last row takes its place."""
        row, last = self.rows.index(sequence), len(self.rows) - 1
        for layer in self._layers:
            for buffer in (layer.keys, layer.values):
                buffer[row] = buffer[last]
        self.rows[row] = self.rows[last]
        self.rows.pop()

    def _append(self, sequences: Sequence[int], hidden: Tensor) -> None:
        for i, token in zip(sequences, self._model.lm_head(hidden).argmax(dim=-1).tolist(), strict=True):
            self.tokens[i].append(token)


def run_stepwise(
    requests: Sequence[Request],
    engine: Engine,
    prefill: Callable[[list[int]], None],
    decode: Callable[[], None],
    release: Callable[[int], None],
) -> int:
    """Schedule as the simulator does, one step at a time; return the number of preemptions."""
    waiting, running, preemptions = deque(range(len(requests))), list[int](), 0
    free = engine.most_blocks
    while waiting or running:
        admitted, tokens = list[int](), 0
        while waiting and len(running) < engine.max_num_seqs:
            context = requests[waiting[0]].context
            if engine.blocks(context) > free or tokens + context > engine.max_num_batched_tokens:
                break
            free, tokens = free - engine.blocks(context), tokens + context
            admitted.append(waiting.popleft())
            running.append(admitted[-1])
        if admitted:
            prefill(admitted)
        else:
            ready = 0
            while ready < len(running):
                held = requests[running[ready]].context - 1
                needed = engine.blocks(held + 1) - engine.blocks(held)
                if needed > free:
                    last = running.pop()
                    free += engine.blocks(requests[last].context - 1)
                    waiting.appendleft(last)
                    release(last)
                    preemptions += 1
                else:
                    free, ready = free - needed, ready + 1
            decode()
        for i in admitted or list(running):
            requests[i].generated += 1
            if requests[i].generated == requests[i].length:
                free += engine.blocks(requests[i].context - 1)
                running.remove(i)
                release(i)
    return preemptions


def measure_costs(model: PreTrainedModel, engine: Engine, rounds: int = 5) -> Costs:
    """Seconds of decoding steps by batch size and context, and of prefills of one and of several prompts."""

    def seconds(rows: int, prompt: int, steps: int) -> tuple[float, float]:
        prefills, decodes = [], []
        for _ in range(rounds):
            batch = Model(model, [[1] * prompt] * rows, rows, prompt + steps + 1)
            prefills.append(_timed(lambda: batch.prefill(list(range(rows)))))  # noqa: B023
            decodes += [_timed(batch.decode) for _ in range(steps)]
        return statistics.median(prefills), statistics.median(decodes)

    sizes = [1 << n for n in range(20) if 1 << n < engine.max_num_seqs] + [engine.max_num_seqs]
    table = {size: seconds(size, _PROMPT, 4) for size in sizes}
    short, long = _PROMPT + 2, 4 * _PROMPT + 2
    most = engine.max_num_seqs
    read = max(0.0, seconds(most, 4 * _PROMPT, 4)[1] - table[most][1]) / (most * (long - short))
    few, many = table[1][0], table[most][0]
    per_token = (many - few) / (_PROMPT * (most - 1))
    return Costs(
        tuple((size, decode - size * short * read) for size, (_, decode) in table.items()),
        read,
        max(0.0, few - _PROMPT * per_token),
        per_token,
    )


def _timed(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout_validation", description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="Hugging Face directory (default: random weights of SmolLM2-135M's shape)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    smollm2 = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_pretrained(options.model) if options.model else LlamaForCausalLM(smollm2)
    costs = measure_costs(model.eval(), _ROOMY)
    print("decoding step:", ", ".join(f"{size} sequences {1000 * s:.0f} ms" for size, s in costs.decode))
    print(f"prefill: {1000 * costs.prefill:.0f} ms and {1000 * costs.prefill_token:.2f} ms a token")
    rng, worst = random.Random(options.seed), 0.0
    lengths = [length for (length,) in _LENGTHS.draw(rng, 48, 1)]
    prompts = [[rng.randrange(1, model.config.vocab_size) for _ in range(_PROMPT)] for _ in lengths]
    for name, engine in ENGINES.items():
        predicted = simulate_engine([Request(_PROMPT, length) for length in lengths], engine, costs)
        batch = Model(model, prompts, engine.max_num_seqs, _PROMPT + _LENGTHS.longest)
        requests = [Request(_PROMPT, length) for length in lengths]
        start = time.process_time()
        preemptions = run_stepwise(requests, engine, batch.prefill, batch.decode, batch.release)
        measured = time.process_time() - start
        error = predicted.seconds / measured - 1
        worst = max(worst, abs(error)) if preemptions == predicted.preemptions else float("inf")
        print(
            f"{name}: predicted {predicted.seconds:.1f} s, {predicted.preemptions} preemptions; "
            f"measured {measured:.1f} s, {preemptions} preemptions; error {error:+.1%}"
        )
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
