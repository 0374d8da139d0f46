"""Simulate over-sampling that keeps groups whole: ``python -m benchmarks.over_sampling``.

An iteration starts more prompts than it trains on and stops at the last whole group that it needs.  Unfinished groups
are continued in the next iteration; their prompts and tokens are prefilled again, for the weights have changed.  A
group that was carried over ``staleness`` times is waited for, or dropped with ``--drop``.
"""

import argparse
import math
import random
import statistics
from dataclasses import dataclass, replace

from benchmarks.rollout_simulator import DECODE_7B, Costs, Engine, LogNormal, Request, parse_decode, simulate_rollout


@dataclass(slots=True)
class Group:
    """The responses to a prompt, and how often it was carried over."""

    responses: list[Request]
    carried: int = 0

    @property
    def mean_length(self) -> float:
        return statistics.mean(response.length for response in self.responses)

    @property
    def whole(self) -> bool:
        return all(response.generated == response.length for response in self.responses)


@dataclass(frozen=True, slots=True)
class Iteration:
    """Seconds of a rollout, the groups that are trained on, carried over and dropped, and preemptions."""

    seconds: float
    trained: list[Group]
    carried: list[Group]
    dropped: list[Group]
    preemptions: int


def iterate(
    groups: list[Group], needed: int, engines: int, engine: Engine, costs: Costs, staleness: int, drop: bool = False
) -> Iteration:
    """Roll out until ``needed`` groups are whole; responses of ``groups`` are advanced.

    Args:
        groups: at least ``needed``, carried ones first; group i runs on engine ``i % engines``.
        needed: groups to train on.
        engines: data-parallel ones.
        engine: limits of each.
        costs: of their steps.
        staleness: how often a group may be carried over.
        drop: drop the groups that were not whole after that instead of waiting for them.
    """
    owned = [
        [(index, response) for index in range(first, len(groups), engines) for response in groups[index].responses]
        for first in range(engines)
    ]
    open_ = [[(index, r) for index, r in own if r.generated < r.length] for own in owned]
    whole = simulate_rollout([[replace(r) for _, r in own] for own in open_], engine, costs)
    end = [0.0] * len(groups)
    for own, run in zip(open_, whole.runs, strict=True):
        for (index, _), finished in zip(own, run.finished, strict=True):
            end[index] = max(end[index], finished)
    order = sorted(range(len(groups)), key=lambda i: (not (groups[i].carried >= staleness and not drop), end[i]))
    chosen = set(order[:needed])
    seconds = max(end[i] for i in chosen)
    stopped = simulate_rollout([[r for _, r in own] for own in open_], engine, costs, until=seconds)
    rest = [group for i, group in enumerate(groups) if i not in chosen]
    dropped = [group for group in rest if drop and group.carried >= staleness and not group.whole]
    carried = [group for group in rest if group not in dropped]
    for group in carried:
        group.carried += 1
    return Iteration(seconds, [groups[i] for i in sorted(chosen)], carried, dropped, stopped.preemptions)


def simulate(
    factor: float,
    seed: int,
    *,
    prompts: int = 128,
    group_size: int = 16,
    engines: int = 16,
    lengths: LogNormal,
    costs: Costs,
    staleness: int,
    drop: bool,
    iterations: int = 20,
    warm_up: int = 5,
) -> list[Iteration]:
    """Iterations after a warm-up; an engine has a slot for each of its responses."""
    rng, started = random.Random(seed), round(factor * prompts)
    slots = math.ceil(started / engines) * group_size
    engine, carried, run = Engine(max_num_seqs=slots), list[Group](), list[Iteration]()
    for _ in range(warm_up + iterations):
        drawn = lengths.draw(rng, max(0, started - len(carried)), group_size)
        new = [Group([Request(150, length) for length in group]) for group in drawn]
        run.append(iterate(carried + new, prompts, engines, engine, costs, staleness, drop))
        carried = run[-1].carried
    return run[warm_up:]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.over_sampling", description=__doc__.split("\n")[0])
    parser.add_argument("--sigma", type=float, default=0.8, help="deviation of the logarithm of lengths (0.8)")
    parser.add_argument("--between", type=float, default=0.5, help="share of its variance between prompts (0.5)")
    parser.add_argument("--staleness", type=int, default=1, help="how often a group may be carried over (1)")
    parser.add_argument("--drop", action="store_true", help="drop groups beyond that instead of waiting for them")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds of an iteration without its rollout (60)")
    parser.add_argument("--decode", default=DECODE_7B, type=parse_decode, metavar="SIZE:SECONDS,...")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    lengths = LogNormal(sigma=options.sigma, between=options.between)
    first: dict[int, float] = {}
    print("factor  rollout s  gain  gain of a step (range)  trained / mean length  stale groups  dropped")
    for factor in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5):
        gains, rollouts, trained, dropped = list[float](), list[float](), list[Group](), 0
        for seed in range(options.seeds):
            run = simulate(
                factor,
                seed,
                lengths=lengths,
                costs=Costs(decode=options.decode),
                staleness=options.staleness,
                drop=options.drop,
            )
            seconds = statistics.mean(iteration.seconds for iteration in run)
            first.setdefault(seed, seconds)
            gains.append(1 - (seconds + options.rest) / (first[seed] + options.rest))
            rollouts.append(seconds)
            trained += [group for iteration in run for group in iteration.trained]
            dropped += sum(len(iteration.dropped) for iteration in run)
        bias = statistics.mean(group.mean_length for group in trained) / lengths.mean - 1
        stale = statistics.mean(group.carried > 0 for group in trained)
        gain = 1 - statistics.mean(rollouts) / statistics.mean(first.values())
        print(
            f"{factor:6}  {statistics.mean(rollouts):9.1f}  {gain:4.0%}  {statistics.mean(gains):7.0%} "
            f"({min(gains):.0%} to {max(gains):.0%})  {bias:+21.1%}  {stale:12.0%}  "
            f"{dropped / (dropped + len(trained)):7.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
