"""Simulate a rollout by data-parallel vLLM engines: time, tail, preemptions and utilisation.

Each engine decodes a batch of at most ``max_num_seqs`` sequences.  Prompts are prefilled before decoding goes on
(AscendScheduler).  If the next token of a sequence needs a KV block and none is free, the sequence admitted last is
preempted: its blocks are freed, and its prompt and tokens are prefilled again later (recomputation).  Prefix caching is
not simulated.  ``docs/port.md`` says how the simulator is validated.
"""

import argparse
import math
import random
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Seconds of a decoding step by batch size, Qwen2.5-VL-7B at TP 1 on Atlas A2: inter-token latency of vLLM-Ascend 0.7.3
#: at 1 request/s (about 3 sequences) and at saturation (github.com/vllm-project/vllm-ascend/issues/776).  That 128
#: sequences decode at saturation is our assumption.
DECODE_7B = ((3, 0.0229), (128, 0.064))
#: Seconds of a prefilled token: 2 FLOPs x 7.6e9 parameters at 150 TFLOP/s; assumed.
PREFILL_TOKEN_7B = 1e-4


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of an engine's steps.

    Attributes:
        decode: pairs of batch size, ascending, and seconds; linear between and beyond them.
        cached_token: of reading one token of the KV cache in a decoding step.
        prefill: of a prefill step, whatever its tokens.
        prefill_token: of each of its tokens.
    """

    decode: tuple[tuple[int, float], ...] = DECODE_7B
    cached_token: float = 0.0
    prefill: float = DECODE_7B[0][1]
    prefill_token: float = PREFILL_TOKEN_7B

    def step(self, batch: int) -> float:
        """Seconds of a decoding step of ``batch`` sequences, without reading the cache."""
        if len(self.decode) == 1:
            return self.decode[0][1]
        i = next((i for i, (size, _) in enumerate(self.decode[1:-1], 1) if batch <= size), len(self.decode) - 1)
        (left, low), (right, high) = self.decode[i - 1], self.decode[i]
        return max(0.0, low + (high - low) * (batch - left) / (right - left))

    def steps(self, contexts: Sequence[int], count: int) -> float:
        """Seconds of ``count`` steps of the same sequences, whose first step reads ``contexts`` tokens of the cache."""
        batch = len(contexts)
        read = count * sum(contexts) + batch * count * (count - 1) // 2
        return count * self.step(batch) + read * self.cached_token


@dataclass(frozen=True, slots=True)
class Engine:
    """Limits of one engine; the defaults are those of ``qwen25_7b_910c``."""

    max_num_seqs: int = 128
    kv_tokens: int = 90 * 6144
    block_size: int = 128
    max_num_batched_tokens: int = 8192

    @property
    def most_blocks(self) -> int:
        return self.kv_tokens // self.block_size

    def blocks(self, tokens: int) -> int:
        """KV blocks of a sequence."""
        return -(-tokens // self.block_size)


@dataclass(slots=True)
class Request:
    """One response: tokens of its prompt, tokens to generate, and tokens generated so far."""

    prompt: int
    length: int
    generated: int = 0

    @property
    def context(self) -> int:
        """Tokens that a prefill computes, and that the next decoding step needs in the KV cache."""
        return self.prompt + self.generated


@dataclass(slots=True)
class EngineRun:
    """Counts and times of one engine.

    Attributes:
        finished: seconds at which each request ended; inf: not within the time.
        seconds: until the last step ended.
        sequence_seconds: sum over decoding steps of batch size x seconds.
        generated: tokens of responses.
        prefilled: tokens of prompts and, recomputed, of responses.
        preemptions: requests whose cache was dropped, repeats included.
    """

    finished: list[float]
    seconds: float = 0.0
    sequence_seconds: float = 0.0
    generated: int = 0
    prefilled: int = 0
    preemptions: int = 0


def simulate_engine(requests: Sequence[Request], engine: Engine, costs: Costs, until: float = math.inf) -> EngineRun:
    """Run the requests in their order; ``generated`` of each is updated.

    Args:
        requests: with 0 <= generated < length.
        engine: its limits.
        costs: of its steps.
        until: seconds after which no step is finished any more.

    Raises:
        ValueError: a request does not fit the engine.
    """
    for request in requests:
        whole = request.prompt + request.length - 1  # the last token is not cached
        # A preempted request must be prefilled in one step.
        if engine.blocks(whole) > engine.most_blocks or whole > engine.max_num_batched_tokens:
            raise ValueError(f"a request of {whole} tokens does not fit {engine}")
    run = EngineRun([math.inf] * len(requests))
    waiting, running = deque(range(len(requests))), list[int]()
    while waiting or running:
        admitted = _admit(requests, waiting, running, engine)
        if admitted:
            tokens = sum(requests[i].context for i in admitted)
            seconds = costs.prefill + tokens * costs.prefill_token
            if run.seconds + seconds > until:
                return run
            run.prefilled += tokens
            ran, count = admitted, 1
            running += admitted
        else:
            while sum(engine.blocks(requests[i].context) for i in running) > engine.most_blocks:
                waiting.appendleft(running.pop())
                run.preemptions += 1
            contexts = [requests[i].context for i in running]
            most = min(requests[i].length - requests[i].generated for i in running)
            count = _decoding_steps(contexts, most, engine, lambda n: run.seconds + costs.steps(contexts, n) <= until)  # noqa: B023
            if count == 0:
                return run
            seconds = costs.steps(contexts, count)
            run.sequence_seconds += len(running) * seconds
            ran = running
        run.seconds += seconds
        run.generated += len(ran) * count
        for index in ran:
            requests[index].generated += count
            if requests[index].generated == requests[index].length:
                run.finished[index] = run.seconds
        running = [i for i in running if math.isinf(run.finished[i])]
    return run


def _admit(requests: Sequence[Request], waiting: deque[int], running: Sequence[int], engine: Engine) -> list[int]:
    """Take requests from the queue, in its order, for a prefill step."""
    used = sum(engine.blocks(requests[i].context - 1) for i in running)
    admitted, tokens = list[int](), 0
    while waiting and len(running) + len(admitted) < engine.max_num_seqs:
        context = requests[waiting[0]].context
        used, tokens = used + engine.blocks(context), tokens + context
        if used > engine.most_blocks or tokens > engine.max_num_batched_tokens:
            break
        admitted.append(waiting.popleft())
    return admitted


def _decoding_steps(contexts: Sequence[int], most: int, engine: Engine, in_time: Callable[[int], bool]) -> int:
    """How many steps, up to ``most``, the KV cache and the time allow before the engine has to decide anew."""

    def impossible(count: int) -> bool:
        needed = sum(engine.blocks(context + count - 1) for context in contexts)
        return needed > engine.most_blocks or not in_time(count)

    return bisect_left(range(1, most + 1), True, key=impossible) if impossible(most) else most


@dataclass(frozen=True, slots=True)
class Rollout:
    """The engines of a rollout, which ends with the last of them."""

    runs: tuple[EngineRun, ...]
    engine: Engine

    @property
    def seconds(self) -> float:
        return max(run.seconds for run in self.runs)

    @property
    def tail_share(self) -> float:
        """Share of the time after 90% of the responses have ended."""
        ends = sorted(end for run in self.runs for end in run.finished)
        return 1 - ends[math.ceil(0.9 * len(ends)) - 1] / self.seconds

    @property
    def utilisation(self) -> float:
        """Mean share of all slots in which a sequence is decoded."""
        slots = len(self.runs) * self.engine.max_num_seqs
        return sum(run.sequence_seconds for run in self.runs) / (slots * self.seconds)

    @property
    def preemptions(self) -> int:
        return sum(run.preemptions for run in self.runs)

    @property
    def tokens_per_second(self) -> float:
        return sum(run.generated for run in self.runs) / self.seconds


def simulate_rollout(
    requests: Sequence[Sequence[Request]], engine: Engine, costs: Costs, until: float = math.inf
) -> Rollout:
    """Run the requests of each engine."""
    return Rollout(tuple(simulate_engine(own, engine, costs, until) for own in requests), engine)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Response lengths: log-normal, cut off at ``longest``.

    Attributes:
        mean: of the lengths as cut off.
        sigma: standard deviation of the logarithm.
        between: share of its variance that the responses to a prompt have in common.
        longest: tokens at which a response is cut off.
    """

    mean: float = 750.0
    sigma: float = 0.8
    between: float = 0.5
    longest: int = 4096

    @property
    def mu(self) -> float:
        """Mean of the logarithm before the cut, which gives ``mean`` after it."""

        def mean_after_cut(mu: float) -> float:
            below, z = math.exp(mu + self.sigma**2 / 2), (math.log(self.longest) - mu) / self.sigma
            normal = statistics.NormalDist().cdf
            return below * normal(z - self.sigma) + self.longest * (1 - normal(z))

        low, high = 0.0, 2 * math.log(self.longest)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if mean_after_cut(middle) < self.mean else (low, middle)
        return low

    def draw(self, rng: random.Random, prompts: int, group_size: int) -> list[list[int]]:
        """Lengths ``[prompts][group_size]``."""
        mu, common, own = self.mu, math.sqrt(self.between), math.sqrt(1 - self.between)
        groups = []
        for _ in range(prompts):
            of_prompt = common * rng.gauss(0, 1)
            logs = (mu + self.sigma * (of_prompt + own * rng.gauss(0, 1)) for _ in range(group_size))
            groups.append([min(self.longest, max(1, round(math.exp(log)))) for log in logs])
        return groups


@dataclass(frozen=True, slots=True)
class Histogram:
    """Response lengths drawn independently of each other, each as often as it was seen."""

    counts: dict[int, int]

    def draw(self, rng: random.Random, prompts: int, group_size: int) -> list[list[int]]:
        """Lengths ``[prompts][group_size]``."""
        lengths = rng.choices([*self.counts], [*self.counts.values()], k=prompts * group_size)
        return [lengths[i : i + group_size] for i in range(0, len(lengths), group_size)]


def read_lengths(path: Path) -> Histogram:
    """Read lines of a length, or of a length and how often it was seen.

    Raises:
        ValueError: a line is neither; the message names it.
    """
    counts: dict[int, int] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            length, count = (int(text) for text in (*line.split(), "1")[:2])
        except ValueError:
            length = count = 0
        if length < 1 or count < 1 or len(line.split()) > 2:
            raise ValueError(
                f"{path}:{number}: expected a length, or a length and a count, of at least 1; got {line!r}"
            )
        counts[length] = counts.get(length, 0) + count
    return Histogram(counts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout_simulator", description=__doc__.split("\n")[0])
    engine, drawn = Engine(), LogNormal()
    parser.add_argument("--lengths", type=Path, help="file of response lengths (LENGTH or LENGTH COUNT per line)")
    parser.add_argument("--mean", type=float, default=drawn.mean, help=f"mean of log-normal lengths ({drawn.mean:g})")
    parser.add_argument("--sigma", type=float, default=drawn.sigma, help=f"deviation of their log ({drawn.sigma})")
    parser.add_argument("--longest", type=int, default=drawn.longest, help=f"cut-off ({drawn.longest})")
    parser.add_argument("--prompts", type=int, default=128, help="prompts of a rollout (128)")
    parser.add_argument("--group-size", type=int, default=16, help="responses to each (16)")
    parser.add_argument("--prompt-tokens", type=int, default=150, help="tokens of a prompt (150)")
    parser.add_argument("--engines", type=int, default=16, help="data-parallel engines (16)")
    parser.add_argument("--max-num-seqs", type=int, default=engine.max_num_seqs, help=f"({engine.max_num_seqs})")
    parser.add_argument("--kv-tokens", type=int, default=engine.kv_tokens, help=f"of an engine ({engine.kv_tokens})")
    parser.add_argument(
        "--decode", default=DECODE_7B, type=parse_decode, metavar="SIZE:SECONDS,...", help="seconds of a step"
    )
    parser.add_argument("--seeds", type=int, default=5, help="rollouts, each with lengths of its own (5)")
    options = parser.parse_args()
    lengths = (
        read_lengths(options.lengths)
        if options.lengths
        else LogNormal(mean=options.mean, sigma=options.sigma, longest=options.longest)
    )
    engine = Engine(max_num_seqs=options.max_num_seqs, kv_tokens=options.kv_tokens)
    print("seed  seconds  tail share  preemptions  utilisation  tokens/s")
    for seed in range(options.seeds):
        groups = lengths.draw(random.Random(seed), options.prompts, options.group_size)
        of_engines = [
            [Request(options.prompt_tokens, length) for group in groups[i :: options.engines] for length in group]
            for i in range(options.engines)
        ]
        rollout = simulate_rollout(of_engines, engine, Costs(decode=options.decode))
        print(
            f"{seed:4}  {rollout.seconds:7.1f}  {rollout.tail_share:10.2f}  {rollout.preemptions:11}  "
            f"{rollout.utilisation:11.2f}  {rollout.tokens_per_second:8.0f}"
        )


def parse_decode(text: str) -> tuple[tuple[int, float], ...]:
    return tuple((int(size), float(seconds)) for size, _, seconds in (pair.partition(":") for pair in text.split(",")))


if __name__ == "__main__":
    main()
