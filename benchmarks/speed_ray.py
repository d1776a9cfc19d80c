"""Environment steps per second of ppo_atari_ray.py beside ppo_atari.py, and a simulation of 4 to 64 workers.

Run:      python benchmarks/speed_ray.py --out benchmarks/speed_ray.md
Measures: whole runs, each a process of its own, with as many environments and the defaults otherwise; rounds alternate,
          a ratio is taken within a round, and medians over rounds are reported with the extremes. The speed is
          charts/SPS, without evaluations, and the learner's idle share charts/waiting, both of all iterations but the
          first. Then what a step costs in each part, on one thread, the update on all cores.
Simulates: each worker has one shard of E environments and a core, workers stand evenly on 8 machines. In an iteration
          the learner sends the weights once to each machine, the workers collect T steps, their answers come one after
          the other through the learner's network, each is unpacked, then comes the update. With --overlap the update
          runs while the next rollout is collected. Costs are those measured here; machines that wait for each other,
          latencies and other traffic are left out, so the figures are bounds.

Nothing else may run on the machine meanwhile; the load average at the start stands in the report.
"""

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import measuring
import numpy as np
import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(measuring.ROOT))
import ppo_atari_ray as script

MACHINES, WORKERS, GIGABITS = 8, (4, 8, 16, 32, 64), (1, 10)
PROGRAMS = {
    "ppo_atari.py": ("ppo_atari", ()),
    "1 worker": ("ppo_atari_ray", ("--num-workers=1",)),
    "2 workers": ("ppo_atari_ray", ("--num-workers=2",)),
    "2 workers, --overlap": ("ppo_atari_ray", ("--num-workers=2", "--overlap")),
}


@dataclass(frozen=True)
class Args:
    """What is measured."""

    out: str | None = None  # Markdown file of the report; the picture gets the same name; none: only printed
    env_id: str = "PongNoFrameskip-v4"  # the game
    num_envs: int = 8  # environments of the measured runs, an even number, in shards of half as many
    iterations: int = 8  # iterations of each run, at least 2; the first one is left out
    rounds: int = 3  # how often every program is measured


@dataclass(frozen=True)
class Costs:
    """Seconds that one step of one environment takes in each part, and bytes that it puts on the wire."""

    emulator: float  # the environment
    inference: float  # the policy, for a shard at once
    packing: float  # compression, by the worker
    unpacking: float  # decompression and stacking, by the learner
    update: float  # all passes over the batch, by the learner
    num_bytes: float  # what is sent
    plain_bytes: float  # what whole stacks would be
    weights: float  # bytes of the network's weights, once an iteration and machine


def run_once(args: Args, name: str) -> tuple[float, float]:
    """Returns steps per second and the learner's idle share of one run, medians over its iterations."""
    program, flags = PROGRAMS[name]
    shard = (f"--envs-per-shard={args.num_envs // 2}",) if program == "ppo_atari_ray" else ()
    with tempfile.TemporaryDirectory() as folder:
        flags = (f"--env-id={args.env_id}", f"--num-envs={args.num_envs}", *shard, *flags, f"--run-dir={folder}")
        total = f"--total-timesteps={args.iterations * args.num_envs * 128}"
        off = ("--eval-every=0", "--checkpoint-every=0", "--eval-episodes=1", "--no-progress", "--no-cuda")
        command = [sys.executable, str(measuring.ROOT / f"{program}.py"), *flags, total, *off]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (run,) = Path(folder).iterdir()
        events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
        tags = events.Tags()["scalars"]
        read = {
            x: [event.value for event in events.Scalars(x)][1:] for x in ("charts/SPS", "charts/waiting") if x in tags
        }
    return statistics.median(read["charts/SPS"]), statistics.median(read.get("charts/waiting", [0]))


def measure_costs(args: Args) -> Costs:
    """Returns what a step costs in each part here: a rollout of one shard and the update on it."""
    args = script.Args(env_id=args.env_id, num_envs=args.num_envs, envs_per_shard=args.num_envs, cuda=False)
    worker = script.Worker(replace(args, num_workers=1), range(1))
    steps, seconds = args.batch_size, {"emulator": 0.0, "packing": 0.0}

    def timed(function, part):  # noqa: ANN001, ANN202
        def call(*values):  # noqa: ANN002, ANN202
            start = time.perf_counter()
            result = function(*values)
            seconds[part] += time.perf_counter() - start
            return result

        return call

    worker.envs[0].step = timed(worker.envs[0].step, "emulator")
    script.pack = timed(script.pack, "packing")
    state, weights = torch.get_rng_state(), worker.agent.state_dict()
    worker.collect(weights, 0, [state])  # the first one warms up
    seconds |= dict.fromkeys(seconds, 0.0)
    start = time.perf_counter()
    (rollout,) = worker.collect(weights, 0, [state])
    inference = time.perf_counter() - start - sum(seconds.values())
    shape = worker.envs[0].single_observation_space.shape
    start = time.perf_counter()
    obs = torch.from_numpy(script.unpack(*rollout["obs"], shape)).flatten(0, 1)
    unpacking = time.perf_counter() - start

    torch.set_num_threads(min(os.cpu_count() or 1, 8))
    agent, actions = worker.agent, rollout["actions"].flatten()
    optimizer = torch.optim.Adam(agent.parameters(), fused=True)
    for epoch in range(args.update_epochs + 1):
        if epoch == 1:
            start = time.perf_counter()
        for chosen in torch.randperm(steps).chunk(args.num_minibatches):
            policy, values = agent(obs[chosen])
            loss = values.square().mean() - policy.log_prob(actions[chosen]).mean() - policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    update = time.perf_counter() - start
    sent = sum(memoryview(x).nbytes for x in rollout["obs"]) + sum(
        x.nbytes for x in rollout.values() if isinstance(x, torch.Tensor)
    )
    parts = (seconds["emulator"], inference, seconds["packing"], unpacking, update, sent)
    return Costs(*(x / steps for x in parts), float(np.prod(shape)), sum(x.nbytes for x in weights.values()))


def simulate(costs: Costs, workers: int, gigabits: float, size: tuple[int, int], overlap: bool) -> dict[str, float]:
    """Returns steps per second, the learner's idle share, and the seconds of an iteration in each part.

    Args:
        costs: of a step.
        workers: on MACHINES machines.
        gigabits: a second, that each machine's network carries.
        size: T and E.
        overlap: the update runs while the next rollout is collected.
    """
    steps, wire = size[0] * size[1], gigabits * 1e9 / 8
    weights = costs.weights * min(workers, MACHINES) / wire
    collect = steps * (costs.emulator + costs.inference + costs.packing)
    # Each answer waits for the network, then for the learner, who unpacks one at a time.
    arrived = unpacked = weights + collect
    for _ in range(workers):
        arrived += steps * costs.num_bytes / wire
        unpacked = max(unpacked, arrived) + steps * costs.unpacking
    network, update = arrived - collect, workers * steps * costs.update
    learner = update + workers * steps * costs.unpacking
    seconds = max(arrived, learner) if overlap else unpacked + update
    parts = {"workers": collect, "network": network, "learner": learner}
    return {"steps": workers * steps / seconds, "idle": 1 - learner / seconds} | parts


def report(args: Args) -> tuple[str, Costs]:
    """Returns the report in Markdown, and the costs."""
    load = os.getloadavg()[0]
    rounds = [{name: run_once(args, name) for name in PROGRAMS} for _ in range(args.rounds)]
    lines = ["# Speed of ppo_atari_ray.py", "", f"`{measuring.command('speed_ray.py')}`  "]
    lines += [
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, load {load:.1f} at the start",
        "",
    ]
    lines += [f"{args.num_envs} x {args.env_id}, {args.iterations} iterations, {args.rounds} rounds", ""]
    lines += ["| program | steps/s: median (least, most) | of ppo_atari.py | learner idle |", "|---|---|---|---|"]
    for name in PROGRAMS:
        speeds = [one[name][0] for one in rounds]
        ratio = statistics.median(one[name][0] / one["ppo_atari.py"][0] for one in rounds)
        idle = statistics.median(one[name][1] for one in rounds)
        spread = f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f}, {max(speeds):,.0f})"
        lines.append(f"| {name} | {spread} | {ratio:.0%} | {idle:.0%} |")
    costs = measure_costs(args)
    lines += ["", "| cost of a step | |", "|---|---|"]
    for name, value in list(asdict(costs).items())[:5]:
        lines.append(f"| {name} | {value * 1e6:,.0f} µs |")
    lines.append(f"| bytes sent | {costs.num_bytes:,.0f}; whole stacks {costs.plain_bytes:,.0f} |")
    lines += ["", f"Simulated, {args.num_envs} environments a worker, {MACHINES} machines:", ""]
    lines += ["| workers | Gbit/s | steps/s | limit | learner idle | steps/s, --overlap | learner idle |"]
    lines.append("|---" * 7 + "|")
    for workers in WORKERS:
        for gigabits in GIGABITS:
            plain, over = (simulate(costs, workers, gigabits, (128, args.num_envs), x) for x in (False, True))
            limit = max(("workers", "network", "learner"), key=plain.get)
            speeds = (
                f"{plain['steps']:,.0f} | {limit} | {plain['idle']:.0%} | {over['steps']:,.0f} | {over['idle']:.0%}"
            )
            lines.append(f"| {workers} | {gigabits} | {speeds} |")
    return "\n".join(lines) + "\n", costs


def draw(costs: Costs, num_envs: int, path: Path) -> None:
    """Draws the seconds of an iteration in each part, divided by its steps, over the number of workers."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    for gigabits, style in zip(GIGABITS, ("-", "--"), strict=True):
        results = [simulate(costs, n, gigabits, (128, num_envs), False) for n in WORKERS]
        for part in ("workers", "network", "learner") if gigabits == GIGABITS[0] else ("network",):
            label = f"{part}, {gigabits} Gbit/s" if part == "network" else part
            axes.plot(WORKERS, [x[part] for x in results], style, marker=".", label=label)
    axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="seconds of an iteration", xticks=WORKERS)
    axes.set_xticklabels(WORKERS)
    axes.legend()
    axes.figure.savefig(path, dpi=150)


def main() -> None:
    """Runs the command line."""
    args = tyro.cli(Args)
    text, costs = report(args)
    print(text)
    if args.out:
        Path(args.out).write_text(text, encoding="utf-8")
        draw(costs, args.num_envs, Path(args.out).with_suffix(".png"))


if __name__ == "__main__":
    main()
