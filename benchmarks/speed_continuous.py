"""Environment steps per second of ppo_continuous.py and of stable-baselines3's PPO, side by side.

Run:    python benchmarks/speed_continuous.py --out benchmarks/speed_continuous.md
Counts: steps over all environments. A timed iteration is a rollout and the update on it, both programs without writing
        logs. The rows "environments alone" take the same steps with random actions and learn nothing: a rollout's
        bound.
Sizes:  are those that the tasks are trained with: the script's own defaults for Pendulum-v1, 16 environments x 256
        steps, minibatches of 128 and 10 epochs for BipedalWalker-v3. Both programs have the same ones, so they take
        equally many gradient steps.
Work:   is the same too. Actor and critic are separate networks of 64 and 64 tanh units. Observations and rewards are
        scaled by running statistics and clipped at 10, there by VecNormalize with the same gamma. Learning rate,
        gamma, gae_lambda and ent_coef are the script's defaults on both tasks, the rate constant as it is there;
        clip_range and clip_range_vf are 0.2, vf_coef and max_grad_norm 0.5; there is no target KL. make_vec_env puts
        its Monitor around each environment by default, as RecordEpisodeStatistics stands around ours. sync is compared
        with DummyVecEnv, async with SubprocVecEnv. Otherwise both run with their defaults: ppo_continuous.py with
        deterministic kernels and a fused optimizer, stable-baselines3 with loss terms read back in each minibatch.
        --compile is ppo_continuous.py's; compiling falls into the untimed iteration.
Fair:   machines are noisy and slow down while they are hot or shared, so one round measures every program once, and
        rounds alternate; a ratio is taken within a round, and medians over rounds are reported, with the extremes.
        Each measurement is a fresh process, so that no thread setting or allocator leaks from one into the next. Torch
        gets the same thread count everywhere, all runs on the CPU, and one whole iteration goes ahead untimed. async
        and SubprocVecEnv have one more process for each environment, whatever the thread count.

Nothing else may run on the machine meanwhile; the load average at the start stands in the report.
"""

import io
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import measuring
import tyro

SEED = 1
SIZES = {
    "BipedalWalker-v3": {"num_envs": 16, "num_steps": 256, "num_minibatches": 16 * 256 // 128, "update_epochs": 10},
    "Pendulum-v1": {},
}
"""arguments of ppo_continuous.py that are not its defaults"""
RATIOS_TO_REACH = {"BipedalWalker-v3": (1.1, 1.35), "Pendulum-v1": (1.2, 1.9)}
"""of sync to DummyVecEnv, without and with --compile"""
PROGRAMS = {
    "sync": "ppo_continuous.py, sync",
    "compile_sync": "ppo_continuous.py, sync, --compile",
    "sb3_sync": "stable-baselines3 PPO, DummyVecEnv",
    "async": "ppo_continuous.py, async",
    "sb3_async": "stable-baselines3 PPO, SubprocVecEnv",
    "env_sync": "environments alone, sync",
    "env_async": "environments alone, async",
}


@dataclass(frozen=True)
class Args:
    """Speed of ppo_continuous.py and of stable-baselines3's PPO, measured in alternation."""

    env_ids: tuple[Literal["BipedalWalker-v3", "Pendulum-v1"], ...] = ("BipedalWalker-v3", "Pendulum-v1")
    """the tasks, each once"""
    rounds: int = 5
    """how often each program is measured on each task"""
    iterations: int = 4
    """timed iterations of a measurement; one more goes ahead untimed"""
    threads: int = 1
    """CPU threads of torch"""
    out: Path | None = None
    """Markdown file to write; the raw measurements go beside it, into a file of the same name that ends in .csv"""

    def __post_init__(self) -> None:
        measuring.check_args(self, ("rounds", "iterations", "threads"))
        if not self.env_ids or len(set(self.env_ids)) < len(self.env_ids):
            raise ValueError(f"--env-ids {' '.join(self.env_ids)}: must be one task or more, each once")


@dataclass(frozen=True)
class Measurement:
    """What one process measured."""

    env_id: str
    round: int
    program: str
    num_envs: int
    num_steps: int
    """of each environment in one iteration"""
    threads: int
    iterations: int
    """timed ones"""
    seconds: float
    """of the timed iterations together"""
    steps_per_second: float


# ----- In a process of its own -----
def time_ours(env_id: str, vector: str, args: Args, compiled: bool = False) -> list[float]:
    """Returns the seconds of each iteration of ppo_continuous.py, by the steps/s that it logs."""
    import numpy as np
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    import ppo_continuous

    # The evaluation after the last iteration is no part of the measurement.
    ppo_continuous.evaluate = lambda *_: {"return": np.zeros(1), "length": np.zeros(1)}
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        script_args = ppo_continuous.Args(
            **ours(env_id, vector, args),
            compile=compiled,
            run_dir=folder,
            eval_every=0,
            checkpoint_every=0,
            eval_episodes=1,
            progress=False,
        )
        ppo_continuous.train(script_args)
        (run_folder,) = Path(folder).iterdir()
        events = EventAccumulator(str(run_folder), size_guidance={"scalars": 0}).Reload()
        return [script_args.batch_size / event.value for event in events.Scalars("charts/SPS")]


def time_sb3(env_id: str, vector: str, args: Args) -> list[float]:
    """Returns the seconds from each start of a rollout of stable-baselines3 to the next."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

    import ppo_continuous

    class Clock(BaseCallback):
        """Notes the time at the start of each rollout and at the end of the training."""

        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        def _on_rollout_start(self) -> None:
            self.times.append(time.perf_counter())

        def _on_step(self) -> bool:
            return True

        def _on_training_end(self) -> None:
            self.times.append(time.perf_counter())

    same = ppo_continuous.Args(**ours(env_id, vector, args))
    vec_env_cls = {"sync": DummyVecEnv, "async": SubprocVecEnv}[vector]
    bare_envs = make_vec_env(env_id, same.num_envs, seed=SEED, vec_env_cls=vec_env_cls)
    with closing(VecNormalize(bare_envs, clip_obs=10, clip_reward=10, gamma=same.gamma)) as envs:
        model = PPO(
            "MlpPolicy",
            envs,
            learning_rate=same.learning_rate,
            n_steps=same.num_steps,
            batch_size=same.batch_size // same.num_minibatches,
            n_epochs=same.update_epochs,
            gamma=same.gamma,
            gae_lambda=same.gae_lambda,
            clip_range=same.clip_coef,
            clip_range_vf=same.clip_coef,
            ent_coef=same.ent_coef,
            vf_coef=same.vf_coef,
            max_grad_norm=same.max_grad_norm,
            target_kl=same.target_kl,
            policy_kwargs={"net_arch": list(same.hidden_sizes)},
            seed=SEED,
            device="cpu",
        )
        clock = Clock()
        # ppo_continuous.py takes the time before it logs, so here nothing is logged.
        model.learn(same.total_timesteps, callback=clock, log_interval=None)
    return [end - start for start, end in itertools.pairwise(clock.times)]


def time_envs(env_id: str, vector: str, args: Args) -> list[float]:
    """Returns the seconds of as many random steps as each iteration has."""
    import ppo_continuous

    script_args = ppo_continuous.Args(**ours(env_id, vector, args))
    seconds = []
    envs = ppo_continuous.make_envs(script_args, script_args.num_envs)
    with ppo_continuous.closing(envs):
        envs.action_space.seed(SEED)
        envs.reset(seed=SEED)
        for _ in range(args.iterations + 1):
            actions = [envs.action_space.sample() for _ in range(script_args.num_steps)]
            start = time.perf_counter()
            for action in actions:
                envs.step(action)
            seconds.append(time.perf_counter() - start)
    return seconds


def ours(env_id: str, vector: str, args: Args) -> dict[str, Any]:
    """Returns the arguments of ppo_continuous.py; what the other program must have too stands here or is a default."""
    import ppo_continuous

    return {
        **SIZES[env_id],
        "env_id": env_id,
        "seed": SEED,
        "cuda": False,
        "threads": args.threads,
        "vector": vector,
        "norm_obs": True,
        "norm_reward": True,
        "total_timesteps": ppo_continuous.Args(**SIZES[env_id]).batch_size * (args.iterations + 1),
        "anneal_lr": False,
        "hidden_sizes": (64, 64),
        "clip_coef": 0.2,
        "clip_vloss": True,
        "vf_coef": 0.5,
        "max_grad_norm": 0.5,
        "target_kl": None,
    }


def measure(env_id: str, round_number: int, program: str, args: Args) -> Measurement:
    """Returns one measurement; called in a fresh process, whose settings it changes."""
    import torch

    import ppo_continuous

    torch.set_num_threads(args.threads)
    kind, _, vector = program.rpartition("_")
    compiled = partial(time_ours, compiled=True)
    time_program = {"": time_ours, "compile": compiled, "sb3": time_sb3, "env": time_envs}[kind]
    seconds = time_program(env_id, vector, args)
    assert len(seconds) == args.iterations + 1, f"want {args.iterations + 1} iterations, got {len(seconds)}"
    timed = sum(seconds[1:])
    sizes = ppo_continuous.Args(**SIZES[env_id])
    return Measurement(
        env_id=env_id,
        round=round_number,
        program=program,
        num_envs=sizes.num_envs,
        num_steps=sizes.num_steps,
        threads=args.threads,
        iterations=args.iterations,
        seconds=timed,
        steps_per_second=args.iterations * sizes.batch_size / timed,
    )


# ----- In the main process -----
def measure_all(args: Args) -> Iterator[Measurement]:
    """Yields all measurements, each from a fresh process, in alternation."""
    for round_number, env_id, program in itertools.product(range(1, args.rounds + 1), args.env_ids, PROGRAMS):
        measurement = measuring.in_own_process(measure, env_id, round_number, program, args)
        line = f"{env_id}, round {round_number}: {PROGRAMS[program]}"
        print(f"{line}: {measurement.steps_per_second:,.0f} steps/s", file=sys.stderr, flush=True)
        yield measurement


def speed_table(measurements: list[Measurement], env_id: str) -> list[str]:
    """Returns the lines of a task's table, and after it the comparisons with the ratio to reach and of async."""
    speeds = {
        program: [m.steps_per_second for m in measurements if m.env_id == env_id and m.program == program]
        for program in PROGRAMS
    }
    pairs = (("sync", "sb3_sync"), ("compile_sync", "sb3_sync"), ("async", "sb3_async"), ("async", "sync"))
    ratios = {(one, other): [a / b for a, b in zip(speeds[one], speeds[other], strict=True)] for one, other in pairs}
    lines = [
        "| program | steps/s, median | min | max | ratio to stable-baselines3, same vector, median (min to max) |",
        "|---|---:|---:|---:|---:|",
    ]
    for program, name in PROGRAMS.items():
        own = speeds[program]
        # Training against bare environments compares nothing.
        pair = (program, f"sb3_{program.removeprefix('compile_')}")
        ratio = measuring.median_and_extremes(ratios[pair]) if pair in ratios else ""
        lines.append(f"| {name} | {median(own):,.0f} | {min(own):,.0f} | {max(own):,.0f} | {ratio} |")
    verdicts = []
    for program, to_reach in zip(("sync", "compile_sync"), RATIOS_TO_REACH[env_id], strict=True):
        reached = median(ratios[program, "sb3_sync"])
        verdict = "reached" if reached >= to_reach else "not reached"
        verdicts.append(f"- ratio to reach: {to_reach}, measured: {reached:.2f} ({PROGRAMS[program]}): {verdict}")
    gain = ratios["async", "sync"]
    return [
        *lines,
        "",
        *verdicts,
        f"- ppo_continuous.py, async to sync: {measuring.median_and_extremes(gain)}: async "
        + ("pays" if median(gain) > 1 else "does not pay"),
    ]


def report(args: Args, measurements: list[Measurement], load: float) -> str:
    """Returns the report in Markdown."""
    import ppo_continuous

    packages = ("torch", "gymnasium", "numpy", "box2d", "stable-baselines3")
    lines = [
        "# Speed of ppo_continuous.py",
        "",
        *measuring.heading("speed_continuous.py", packages, "cpu", load),
        f"- Threads: {args.threads}; steps are over all environments; seed {SEED}.",
        f"- Rounds in alternation: {args.rounds}; each measurement: 1 untimed iteration, {args.iterations} timed.",
    ]
    for env_id in args.env_ids:
        sizes = ppo_continuous.Args(**SIZES[env_id])
        lines += [
            "",
            f"## {env_id}: {sizes.num_envs} environments x {sizes.num_steps} steps, {sizes.update_epochs} epochs, "
            f"minibatches of {sizes.batch_size // sizes.num_minibatches}",
            "",
            *speed_table(measurements, env_id),
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the command line: status 0 when done, 2 when the arguments are wrong or a package is missing."""
    args = tyro.cli(Args)
    # The processes of the measurements inherit this path.
    sys.path.insert(0, str(measuring.ROOT))
    import gymnasium as gym

    import ppo_continuous

    try:
        for env_id in args.env_ids:
            # Now rather than in the middle: Box2D may be missing.
            ppo_continuous.make_env(ppo_continuous.Args(env_id=env_id)).close()
        measuring.publish(measure_all(args), partial(report, args), args.out)
    except (ppo_continuous.UsageError, gym.error.Error, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
