"""Environment steps per second of ppo_atari.py or a2c_atari.py and of stable-baselines3's PPO or A2C, side by side.

Run:    python benchmarks/speed_atari.py --out benchmarks/speed_atari.md
        python benchmarks/speed_atari.py --script a2c_atari --num-envs 16 --iterations 40 \
            --rounds 3 --size-rounds 0 --out benchmarks/speed_a2c.md
Counts: agent steps over all environments, 4 frames of the emulator each. A timed iteration is a rollout of 128 steps
        (A2C: 5) of each environment and the update on it (4 epochs, minibatches of 256; A2C: one of the whole batch),
        both programs without writing logs.
        The rows "environments alone" take the same steps with random actions and learn nothing: a rollout's bound.
Fair:   machines are noisy and slow down while they are hot or shared, so one round measures every program once, and
        rounds alternate; a ratio is taken within a round, and medians over rounds are reported, with the extremes.
        Each measurement is a fresh process, so that no thread setting, allocator or compiled kernel leaks from one
        into the next. Torch, OpenCV and the emulator get the same thread count everywhere, sizes and device are the
        same, and one whole iteration goes ahead untimed. Otherwise both programs run with their defaults: our script
        with deterministic kernels, stable-baselines3 with its own wrappers. --compile and --amp are our script's.
Memory: the peak of the measurement's process, for our script with its checkpoint and without an evaluation.
        On a GPU also the peak of what torch's allocator reserved, which leaves out the CUDA context.

Nothing else may run on the machine meanwhile; the load average at the start stands in the report.
"""

import dataclasses
import importlib
import importlib.metadata
import io
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import measuring
import tyro

NUM_STEPS = {"ppo_atari": 128, "a2c_atari": 5}
PEERS = {"ppo_atari": "PPO", "a2c_atari": "A2C"}
"""classes of stable-baselines3"""
MINIBATCH_SIZE = 256
UPDATE_EPOCHS = 4
SEED = 1
SIZES = (8, 16, 64)
"""numbers of environments in the second table"""
RATIO_TO_REACH = 1.6
PROGRAMS = {
    "ale": "ours, ale",
    "gymnasium": "ours, gymnasium sync",
    "sb3": "stable-baselines3",
    "env_ale": "environments alone, ale",
    "env_gymnasium": "environments alone, gymnasium sync",
}


@dataclass(frozen=True)
class Args:
    """Speed of one of our scripts and of stable-baselines3, measured in alternation."""

    script: Literal["ppo_atari", "a2c_atari"] = "ppo_atari"
    """our script"""
    env_id: str = "PongNoFrameskip-v4"
    """an Atari game"""
    rounds: int = 5
    """how often each program is measured"""
    size_rounds: int = 1
    """how often each number of environments of the second table is measured; 0: no second table"""
    iterations: int = 4
    """timed iterations of a measurement; one more goes ahead untimed"""
    num_envs: int = 8
    """parallel environments in the first table; of PPO an even number"""
    threads: int = 0
    """CPU threads of torch, of OpenCV and of the emulator; 0: one for each core"""
    cuda: bool = True
    """use a CUDA device where there is one, else the CPU"""
    compile: bool = False
    """passed on to our script"""
    amp: bool = False
    """passed on to our script"""
    out: Path | None = None
    """Markdown file to write; the raw measurements go beside it, into a file of the same name that ends in .csv"""

    def __post_init__(self) -> None:
        measuring.check_args(self, ("rounds", "iterations", "num_envs"))
        for name in ("size_rounds", "threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 0")
        if self.script == "ppo_atari" and self.batch_size(self.num_envs) % MINIBATCH_SIZE:
            raise ValueError(f"--num-envs {self.num_envs}: times 128 must be a multiple of the minibatch, 256")

    def batch_size(self, num_envs: int) -> int:
        """Returns the samples of one rollout."""
        return num_envs * NUM_STEPS[self.script]


@dataclass(frozen=True)
class Measurement:
    """What one process measured."""

    table: int
    round: int
    program: str
    num_envs: int
    threads: int
    device: str
    iterations: int
    """timed ones"""
    seconds: float
    """of the timed iterations together"""
    steps_per_second: float
    rss_mib: float
    """peak of the resident memory"""
    cuda_mib: float
    """peak of what torch reserved on the GPU; 0 on a CPU"""


# ----- In a process of its own -----
def time_ours(backend: str, num_envs: int, args: Args, device: str) -> tuple[list[float], float]:
    """Returns the seconds of each iteration of our script, by the steps/s that it logs, and the peak memory, MiB."""
    import numpy as np

    script, batch_size = importlib.import_module(args.script), args.batch_size(num_envs)
    # The evaluation after the last iteration is no part of the measurement.
    script.evaluate = lambda *_: {"return": np.zeros(1), "length": np.zeros(1)}
    passes = {"num_minibatches": batch_size // MINIBATCH_SIZE, "update_epochs": UPDATE_EPOCHS}
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        script_args = script.Args(
            **ours(backend, num_envs, args),
            **(passes if args.script == "ppo_atari" else {}),
            num_steps=NUM_STEPS[args.script],
            total_timesteps=batch_size * (args.iterations + 1),
            cuda=device == "cuda",
            compile=args.compile,
            amp=args.amp,
            run_dir=folder,
            eval_every=0,
            checkpoint_every=0,
            eval_episodes=1,
            progress=False,
        )
        script.train(script_args)
        memory = measuring.peak_rss_mib()
        # Only now, so that it does not count as memory of the training.
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        (run_folder,) = Path(folder).iterdir()
        events = EventAccumulator(str(run_folder), size_guidance={"scalars": 0}).Reload()
        return [batch_size / event.value for event in events.Scalars("charts/SPS")], memory


def time_sb3(num_envs: int, args: Args, device: str) -> tuple[list[float], float]:
    """Returns the seconds from each start of a rollout of stable-baselines3 to the next, and the peak memory, MiB."""
    import ale_py
    import gymnasium as gym
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.utils import set_random_seed
    from stable_baselines3.common.vec_env import VecFrameStack

    class Clock(BaseCallback):
        """Notes the time at the start of each rollout and at the end of the training."""

        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        def note(self) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())

        def _on_rollout_start(self) -> None:
            self.note()

        def _on_step(self) -> bool:
            return True

        def _on_training_end(self) -> None:
            self.note()

    gym.register_envs(ale_py)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    # Not the model's own seed, which would switch cuDNN to slower kernels.
    set_random_seed(SEED)
    # An ALE/ id alone would skip 4 frames of its own, beside the wrapper's.
    envs = VecFrameStack(make_atari_env(args.env_id, num_envs, seed=SEED, env_kwargs={"frameskip": 1}), 4)
    passes = {"batch_size": MINIBATCH_SIZE, "n_epochs": UPDATE_EPOCHS, "clip_range": 0.1, "learning_rate": 2.5e-4}
    model = getattr(stable_baselines3, PEERS[args.script])(
        "CnnPolicy",
        envs,
        n_steps=NUM_STEPS[args.script],
        ent_coef=0.01,
        device=device,
        **(passes if args.script == "ppo_atari" else {}),  # its A2C's optimizer is torch's RMSprop, as ours is
    )
    clock = Clock()
    # Our script takes the time before it logs, so here nothing is logged.
    model.learn(args.batch_size(num_envs) * (args.iterations + 1), callback=clock, log_interval=None)
    envs.close()
    return [end - start for start, end in itertools.pairwise(clock.times)], measuring.peak_rss_mib()


def time_envs(backend: str, num_envs: int, args: Args) -> tuple[list[float], float]:
    """Returns the seconds of as many random steps as each iteration has, and the peak memory, MiB."""
    import numpy as np

    script = importlib.import_module(args.script)
    script_args = script.Args(**ours(backend, num_envs, args))
    rng = np.random.default_rng(SEED)
    seconds = []
    with script.closing(script.make_envs(script_args, num_envs)) as envs:
        envs.reset(seed=SEED)
        for _ in range(args.iterations + 1):
            actions = rng.integers(envs.single_action_space.n, size=(NUM_STEPS[args.script], num_envs))
            start = time.perf_counter()
            for action in actions:
                envs.step(action)
            seconds.append(time.perf_counter() - start)
    return seconds, measuring.peak_rss_mib()


def ours(backend: str, num_envs: int, args: Args) -> dict[str, str | int]:
    """Returns the arguments of our script that its environments depend on."""
    return {
        "env_id": args.env_id,
        "seed": SEED,
        "backend": backend,
        "vector": "sync",
        "num_envs": num_envs,
        "threads": args.threads,
    }


def measure(table: int, round_number: int, program: str, num_envs: int, args: Args) -> Measurement:
    """Returns one measurement; called in a fresh process, whose settings it changes."""
    import cv2
    import torch

    torch.set_num_threads(args.threads)
    cv2.setNumThreads(args.threads)
    device = "cuda" if args.cuda and torch.cuda.is_available() else "cpu"
    kind, _, backend = program.rpartition("_")
    if kind == "env":
        seconds, memory = time_envs(backend, num_envs, args)
    elif program == "sb3":
        seconds, memory = time_sb3(num_envs, args, device)
    else:
        seconds, memory = time_ours(backend, num_envs, args, device)
    assert len(seconds) == args.iterations + 1, f"want {args.iterations + 1} iterations, got {len(seconds)}"
    timed = sum(seconds[1:])
    return Measurement(
        table=table,
        round=round_number,
        program=program,
        num_envs=num_envs,
        threads=args.threads,
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        iterations=args.iterations,
        seconds=timed,
        steps_per_second=args.iterations * args.batch_size(num_envs) / timed,
        rss_mib=memory,
        cuda_mib=torch.cuda.max_memory_reserved() / 2**20 if device == "cuda" else 0.0,
    )


# ----- In the main process -----
def measure_all(args: Args) -> Iterator[Measurement]:
    """Yields all measurements, each from a fresh process: the first table's in alternation, then the second's."""
    todo = [(1, i, program, args.num_envs) for i in range(1, args.rounds + 1) for program in PROGRAMS]
    todo += [(2, i, "ale", num_envs) for i in range(1, args.size_rounds + 1) for num_envs in SIZES]
    for job in todo:
        measurement = measuring.in_own_process(measure, *job, args)
        table, round_number, program, num_envs = job
        line = f"table {table}, round {round_number}: {PROGRAMS[program]}, {num_envs} environments"
        print(f"{line}: {measurement.steps_per_second:,.0f} steps/s", file=sys.stderr, flush=True)
        yield measurement


def speed_table(measurements: list[Measurement]) -> list[str]:
    """Returns the lines of the first table, and last the one that compares with the ratio to reach."""
    speeds = {
        program: [m.steps_per_second for m in measurements if m.table == 1 and m.program == program]
        for program in PROGRAMS
    }
    lines = [
        "| program | steps/s, median | min | max | ratio to stable-baselines3, median (min to max) |",
        "|---|---:|---:|---:|---:|",
    ]
    ratios = {}
    for program, name in PROGRAMS.items():
        own = speeds[program]
        ratios[program] = [a / b for a, b in zip(own, speeds["sb3"], strict=True)]
        # Training against bare environments compares nothing.
        ratio = "" if program.startswith("env_") else measuring.median_and_extremes(ratios[program])
        lines.append(f"| {name} | {median(own):,.0f} | {min(own):,.0f} | {max(own):,.0f} | {ratio} |")
    reached = median(ratios["ale"])
    verdict = "reached" if reached >= RATIO_TO_REACH else "not reached"
    return [*lines, "", f"ratio to reach: {RATIO_TO_REACH}, measured: {reached:.2f} ({PROGRAMS['ale']}): {verdict}"]


def size_table(measurements: list[Measurement]) -> list[str]:
    """Returns the lines of the second table; medians over its rounds of speeds, maxima of memory."""
    lines = ["| environments | steps/s | peak memory, MiB | peak GPU memory, MiB |", "|---:|---:|---:|---:|"]
    for num_envs in SIZES:
        own = [m for m in measurements if m.table == 2 and m.num_envs == num_envs]
        cuda_mib = max(m.cuda_mib for m in own)
        cells = [
            f"{num_envs}",
            f"{median(m.steps_per_second for m in own):,.0f}",
            f"{max(m.rss_mib for m in own):,.0f}",
            f"{cuda_mib:,.0f}" if cuda_mib else "no GPU",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def report(args: Args, measurements: list[Measurement], load: float) -> str:
    """Returns the report in Markdown."""
    packages = ("torch", "gymnasium", "ale-py", "stable-baselines3")
    flags = " ".join(f"--{name}" for name in ("compile", "amp") if getattr(args, name)) or "none"
    passes = f"{UPDATE_EPOCHS} epochs, minibatches of {MINIBATCH_SIZE}" if args.script == "ppo_atari" else "one batch"
    lines = [
        f"# Speed of {args.script}.py beside stable-baselines3's {PEERS[args.script]}, {args.env_id}",
        "",
        *measuring.heading("speed_atari.py", packages, measurements[0].device, load),
        f"- Threads: {args.threads}; further flags of {args.script}.py: {flags}",
        f"- Steps are agent steps over all environments, 4 frames each; seed {SEED}.",
        "",
        f"## {args.num_envs} environments x {NUM_STEPS[args.script]} steps, {passes}",
        "",
        f"Rounds in alternation: {args.rounds}; each measurement: 1 untimed iteration, {args.iterations} timed.",
        "",
        *speed_table(measurements),
    ]
    if args.size_rounds:
        lines += [
            "",
            f"## {args.script}.py, ale, by number of environments",
            "",
            f"Rounds: {args.size_rounds}; the other sizes as above.",
            "",
            *size_table(measurements),
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the command line: status 0 when done, 2 when the arguments are wrong."""
    args = tyro.cli(Args)
    args = dataclasses.replace(args, threads=args.threads or measuring.num_cores())
    # The processes of the measurements inherit this path.
    sys.path.insert(0, str(measuring.ROOT))
    import ppo_atari

    try:
        if not ppo_atari.is_atari(ppo_atari.find_spec(args.env_id)):
            raise ppo_atari.UsageError(f"--env-id {args.env_id}: this is no Atari game")
        measuring.publish(measure_all(args), partial(report, args), args.out)
    except (ppo_atari.UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
