"""Speed and memory of dqn_atari.py and of stable-baselines3's DQN, side by side.

Run:    python benchmarks/speed_dqn.py --out benchmarks/speed_dqn.md
Counts: agent steps over all environments, 4 frames of the emulator each. The replay memory is filled first and learning
        starts then; after a stretch of untimed steps that learn, the timed ones follow. dqn_atari.py is timed with its
        log, a point in 100 steps, stable-baselines3 without any; start-up and evaluation stay out of it.
Work:   is the same. NatureCNN, Adam, batches of 32, Huber loss, a fixed epsilon; sizes, rates and intervals below.
        dqn_atari.py counts train_frequency in steps over all environments, stable-baselines3 train_freq in vector steps
        of N environments: with g = gcd(train_frequency, N), train_freq = train_frequency / g and gradient_steps = N / g
        are equally many gradient steps for each environment step. The updates of the timed steps are counted in both.
        stable-baselines3 has its own wrappers and DummyVecEnv, takes random actions while its memory fills, and draws
        once for all environments whether to explore, which spares it the network in a share epsilon of the steps.
Fair:   machines are noisy and slow down while they are hot or shared, so one round measures every program once, and
        rounds alternate; a ratio is taken within a round, and medians over rounds are reported, with the extremes.
        Each measurement is a fresh process, so that no thread setting, allocator or compiled kernel leaks from one
        into the next. Torch, OpenCV and the emulator get the same thread count everywhere. Otherwise both programs run
        with their defaults: dqn_atari.py with deterministic kernels and a fused optimizer, stable-baselines3 with the
        loss read back at each update. --compile, --amp and --replay-on-device are dqn_atari.py's.
Memory: a training's is the peak of its process, all that it loaded included, for dqn_atari.py with its checkpoint and
        without its evaluation. On a GPU also the peak of what torch's allocator reserved, which leaves out the
        CUDA context. A full replay memory's is the sum of its arrays, which are as long as it has transitions; beside
        it stands what a process grew by when it filled one with random frames. Its sampling is timed on one thread.

Nothing else may run on the machine meanwhile; the load average at the start stands in the report.
"""

import dataclasses
import io
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import measuring
import psutil
import tyro

if TYPE_CHECKING:
    import numpy as np

SEED = 1
BATCH_SIZE = 32
LEARNING_RATE = 1e-4
GAMMA = 0.99
MAX_GRAD_NORM = 10.0
TARGET_INTERVAL = 1_000
"""steps over all environments between copies to the target network"""
EPSILON = 0.01
OBS_SHAPE = (4, 84, 84)
NUM_ACTIONS = 6
SIZES = (100_000, 1_000_000)
"""transitions of the replay memories whose size is computed"""
SAMPLES = 1_000
"""timed calls of a sampling measurement"""
SPEED_RATIO_TO_REACH = 1.5
MEMORY_RATIO_TO_REACH = 0.25
SAMPLE_MS_TO_REACH = 1.0
PROGRAMS = {"ours": "dqn_atari.py", "sb3": "stable-baselines3 DQN"}
MEMORIES = {
    "ours": "dqn_atari.py",
    "sb3": "stable-baselines3",
    "sb3_optimized": "stable-baselines3, optimize_memory_usage",
}
TASKS = {"train": "steps/s", "sample": "ms for a batch", "sample_to_gpu": "ms for a batch on the GPU"}


@dataclass(frozen=True)
class Args:
    """Speed and memory of dqn_atari.py and of stable-baselines3's DQN, measured in alternation."""

    env_id: str = "PongNoFrameskip-v4"
    """an Atari game"""
    rounds: int = 3
    """how often each program is measured"""
    steps: int = 2_000
    """timed steps of a measurement, over all environments; rounded up to whole updates of stable-baselines3"""
    untimed_steps: int = 500
    """steps that learn and go ahead untimed"""
    num_envs: int = 8
    """parallel environments"""
    train_frequency: int = 4
    """steps over all environments for each update"""
    buffer_size: int = 20_000
    """transitions of the replay memory while a training is timed, which starts when it is full"""
    sample_size: int = 100_000
    """transitions of the full replay memory whose sampling is timed; 100,000 take stable-baselines3 5.3 GiB"""
    threads: int = 0
    """CPU threads of torch, of OpenCV and of the emulator in a training; 0: one for each core"""
    cuda: bool = True
    """use a CUDA device where there is one, else the CPU"""
    compile: bool = False
    """passed on to dqn_atari.py"""
    amp: bool = False
    """passed on to dqn_atari.py"""
    replay_on_device: bool = False
    """passed on to dqn_atari.py"""
    out: Path | None = None
    """Markdown file to write; the raw measurements go beside it, into a file of the same name that ends in .csv"""

    def __post_init__(self) -> None:
        measuring.check_args(self, ("rounds", "steps", "untimed_steps", "num_envs", "train_frequency"))
        for name in ("buffer_size", "sample_size"):
            if getattr(self, name) < 16 * self.num_envs:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 16 * num_envs")
        if self.threads < 0:
            raise ValueError(f"--threads {self.threads}: must be at least 0")

    @property
    def total_steps(self) -> int:
        """All steps of a training, in whole vector steps and whole updates of both programs."""
        unit = math.lcm(self.num_envs, self.train_frequency)
        return math.ceil((self.buffer_size + self.untimed_steps + self.steps) / unit) * unit


@dataclass(frozen=True)
class Measurement:
    """What one process measured; a training has no times of samples, a sampling no steps."""

    task: str
    round: int
    program: str
    threads: int
    device: str
    steps: int | None = None
    """timed ones"""
    updates: int | None = None
    """in the timed steps"""
    seconds: float | None = None
    """of the timed steps together"""
    steps_per_second: float | None = None
    rss_mib: float | None = None
    """peak of the resident memory"""
    cuda_mib: float | None = None
    """peak of what torch reserved on the GPU; 0 on a CPU"""
    sample_ms: float | None = None
    """median time of a batch"""
    sample_ms_90: float | None = None
    """time that 90 % of the batches did not exceed"""
    growth_mib: float | None = None
    """of the resident memory, by making and filling the replay memory"""


@dataclass(frozen=True)
class Mark:
    """How far a training was at a moment."""

    step: int
    updates: int
    time: float


# ----- In a process of its own: training -----
def train_ours(args: Args, device: str) -> list[Mark]:
    """Trains with dqn_atari.py; returns a mark for each point of its log."""
    import numpy as np

    import dqn_atari

    marks = []

    class MarkedRun(dqn_atari.Run):
        """Notes the time at each point of the log, where the losses have just been read back."""

        def log(self, scalars: dict[str, float]) -> None:
            """Notes the time and writes the log."""
            of_weights = next(iter(self.modules["optimizer"].state.values()), {"step": 0})
            marks.append(Mark(self.counters["global_step"], int(of_weights["step"]), time.perf_counter()))
            super().log(scalars)

    dqn_atari.Run = MarkedRun
    # The evaluation after the last step is no part of the measurement.
    dqn_atari.evaluate = lambda *_: {"return": np.zeros(1), "length": np.zeros(1)}
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        dqn_atari.train(
            dqn_atari.Args(
                env_id=args.env_id,
                seed=SEED,
                num_envs=args.num_envs,
                threads=args.threads,
                buffer_size=args.buffer_size,
                batch_size=BATCH_SIZE,
                learning_starts=args.buffer_size,
                train_frequency=args.train_frequency,
                target_network_frequency=TARGET_INTERVAL,
                learning_rate=LEARNING_RATE,
                gamma=GAMMA,
                max_grad_norm=MAX_GRAD_NORM,
                loss="huber",
                start_e=EPSILON,
                end_e=EPSILON,
                total_timesteps=args.total_steps,
                cuda=device == "cuda",
                compile=args.compile,
                amp=args.amp,
                replay_on_device=args.replay_on_device,
                run_dir=folder,
                eval_every=0,
                checkpoint_every=0,
                eval_episodes=1,
                progress=False,
            )
        )
    return marks


def train_sb3(args: Args, device: str) -> list[Mark]:
    """Trains with stable-baselines3; returns a mark for each time it starts to collect steps, and for the end."""
    import ale_py
    import gymnasium as gym
    import torch
    from stable_baselines3 import DQN
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.utils import set_random_seed
    from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

    class Clock(BaseCallback):
        """Notes the time before each collection of steps, which is after the updates before it, and at the end."""

        def __init__(self) -> None:
            super().__init__()
            self.marks: list[Mark] = []

        def note(self) -> None:
            self.marks.append(Mark(self.num_timesteps, self.model._n_updates, time.perf_counter()))

        def _on_rollout_start(self) -> None:
            self.note()

        def _on_step(self) -> bool:
            return True

        def _on_training_end(self) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            self.num_timesteps = self.model.num_timesteps
            self.note()

    gym.register_envs(ale_py)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    # Not DQN's own seed, which would switch cuDNN to slower kernels.
    set_random_seed(SEED)
    # An ALE/ id alone would skip 4 frames of its own, beside the wrapper's.
    games = make_atari_env(args.env_id, args.num_envs, seed=SEED, env_kwargs={"frameskip": 1}, vec_env_cls=DummyVecEnv)
    common = math.gcd(args.train_frequency, args.num_envs)
    with closing(VecFrameStack(games, 4)) as envs:
        model = DQN(
            "CnnPolicy",
            envs,
            learning_rate=LEARNING_RATE,
            buffer_size=args.buffer_size,
            learning_starts=args.buffer_size,
            batch_size=BATCH_SIZE,
            gamma=GAMMA,
            train_freq=args.train_frequency // common,
            gradient_steps=args.num_envs // common,
            target_update_interval=TARGET_INTERVAL,
            exploration_initial_eps=EPSILON,
            exploration_final_eps=EPSILON,
            max_grad_norm=MAX_GRAD_NORM,
            device=device,
        )
        clock = Clock()
        model.learn(args.total_steps, callback=clock, log_interval=None)
    return clock.marks


def measure_training(program: str, args: Args, device: str) -> dict[str, Any]:
    """Returns the speed of the steps after the untimed ones, and the peak memory."""
    import torch

    marks = {"ours": train_ours, "sb3": train_sb3}[program](args, device)
    start = next(mark for mark in marks if mark.step >= args.buffer_size + args.untimed_steps)
    end = next(mark for mark in marks if mark.step >= args.total_steps)  # ours then evaluates and keeps a checkpoint
    steps, updates, seconds = end.step - start.step, end.updates - start.updates, end.time - start.time
    assert end.step == args.total_steps, f"want {args.total_steps} steps, got {end.step}"
    assert abs(updates - steps / args.train_frequency) <= args.num_envs, f"{updates} updates in {steps} steps"
    return {
        "steps": steps,
        "updates": updates,
        "seconds": seconds,
        "steps_per_second": steps / seconds,
        "rss_mib": measuring.peak_rss_mib(),
        "cuda_mib": torch.cuda.max_memory_reserved() / 2**20 if device == "cuda" else 0.0,
    }


# ----- In a process of its own: sampling -----
def make_memory(kind: str, size: int, args: Args, device: str) -> Any:  # noqa: ANN401 (one of two classes)
    """Returns an empty replay memory of one of MEMORIES; its batches go to the device."""
    import numpy as np
    import torch
    from gymnasium import spaces

    import dqn_atari

    if kind == "ours":
        replay_device = torch.device(device if args.replay_on_device else "cpu")
        return dqn_atari.ReplayBuffer(size, args.num_envs, OBS_SHAPE, OBS_SHAPE[0], replay_device)
    from stable_baselines3.common.buffers import ReplayBuffer

    return ReplayBuffer(
        size,
        spaces.Box(0, 255, OBS_SHAPE, np.uint8),
        spaces.Discrete(NUM_ACTIONS),
        device,
        args.num_envs,
        optimize_memory_usage=kind == "sb3_optimized",
        # stable-baselines3 refuses both at once.
        handle_timeout_termination=kind != "sb3_optimized",
    )


def random_steps(num_envs: int) -> Iterator[tuple["np.ndarray", ...]]:
    """Yields steps (obs, next_obs, action, reward, done) of random frames without end; one in 200 ends an episode."""
    import numpy as np

    rng = np.random.default_rng(SEED)

    def newest(older: np.ndarray) -> np.ndarray:
        frame = rng.integers(256, size=(num_envs, 1, *OBS_SHAPE[1:]), dtype=np.uint8)
        return np.concatenate([older[:, 1:], frame], axis=1)

    start = np.zeros((num_envs, *OBS_SHAPE), dtype=np.uint8)
    obs = newest(start)
    while True:
        next_obs, done = newest(obs), rng.random(num_envs) < 1 / 200
        action = rng.integers(NUM_ACTIONS, size=num_envs)
        yield obs, next_obs, action, rng.integers(-1, 2, size=num_envs).astype(np.float32), done
        obs = np.where(done[:, None, None, None], newest(start), next_obs) if done.any() else next_obs


def full_memory(program: str, args: Args, device: str) -> Callable[[], object]:
    """Returns what draws a batch from a full replay memory."""
    import torch

    memory = make_memory(program, args.sample_size, args, device)
    # A tenth more, since ours gives up a row for each end of an episode.
    num_adds = 11 * args.sample_size // (10 * args.num_envs)
    for _, (obs, next_obs, action, reward, done) in zip(range(num_adds), random_steps(args.num_envs), strict=False):
        if program == "ours":
            memory.add(obs, next_obs, action, reward, done)
        else:
            memory.add(obs, next_obs, action, reward, done, [{}] * args.num_envs)
    if program == "ours":
        return lambda: memory.sample(BATCH_SIZE, torch.device(device))
    return lambda: memory.sample(BATCH_SIZE)


def measure_sampling(program: str, args: Args, device: str) -> dict[str, Any]:
    """Returns how long a batch takes, and how much a full replay memory adds to the resident memory."""
    import numpy as np
    import torch

    # What is loaded and started on first use is no part of the memory.
    make_memory(program, 16 * args.num_envs, args, device)
    torch.zeros(1, device=device)
    before = psutil.Process().memory_info().rss
    sample = full_memory(program, args, device)
    growth = psutil.Process().memory_info().rss - before
    seconds = []
    for _ in range(SAMPLES // 10 + SAMPLES):
        start = time.perf_counter()
        sample()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    ms = np.array(seconds[-SAMPLES:]) * 1e3
    quantile = float(np.quantile(ms, 0.9))
    return {"sample_ms": float(np.median(ms)), "sample_ms_90": quantile, "growth_mib": growth / 2**20}


def measure(task: str, round_number: int, program: str, args: Args) -> Measurement:
    """Returns one measurement; called in a fresh process, whose settings it changes."""
    import cv2
    import torch

    threads = args.threads if task == "train" else 1
    torch.set_num_threads(threads)
    cv2.setNumThreads(threads)
    device = "cuda" if args.cuda and torch.cuda.is_available() and task != "sample" else "cpu"
    results = (measure_training if task == "train" else measure_sampling)(program, args, device)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return Measurement(task, round_number, program, threads, name, **results)


# ----- In the main process -----
def measure_all(args: Args) -> Iterator[Measurement]:
    """Yields all measurements, each from a fresh process, in alternation."""
    import torch

    use_cuda = args.cuda and torch.cuda.is_available()
    tasks = [task for task in TASKS if use_cuda or task != "sample_to_gpu"]
    todo = [(task, i, program) for i in range(1, args.rounds + 1) for task in tasks for program in PROGRAMS]
    for task, round_number, program in todo:
        measurement = measuring.in_own_process(measure, task, round_number, program, args)
        value = measurement.steps_per_second or measurement.sample_ms
        line = f"round {round_number}: {PROGRAMS[program]}: {value:,.2f} {TASKS[task]}"
        print(line, file=sys.stderr, flush=True)
        yield measurement


def of_program(measurements: list[Measurement], task: str, program: str, name: str) -> list[float]:
    """Returns what a program's measurements of a task found, in the order of the rounds."""
    return [getattr(m, name) for m in measurements if m.task == task and m.program == program]


def ratios(measurements: list[Measurement], task: str, name: str) -> list[float]:
    """Returns dqn_atari.py's number divided by stable-baselines3's, round by round."""
    ours, sb3 = (of_program(measurements, task, program, name) for program in ("ours", "sb3"))
    return [a / b for a, b in zip(ours, sb3, strict=True)]


def speed_table(measurements: list[Measurement]) -> list[str]:
    """Returns the lines on trainings: speeds, peak memory, and the comparison with the ratio to reach."""
    lines = [
        "| program | steps/s, median | min | max | updates in the timed steps | peak memory, MiB | on the GPU, MiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for program, name in PROGRAMS.items():
        speeds, updates, steps, rss_mib, cuda_mib = (
            of_program(measurements, "train", program, field)
            for field in ("steps_per_second", "updates", "steps", "rss_mib", "cuda_mib")
        )
        cells = [name, *(f"{x:,.0f}" for x in (median(speeds), min(speeds), max(speeds)))]
        cells += [f"{updates[0]:,} in {steps[0]:,}", f"{max(rss_mib):,.0f}"]
        cells += [f"{max(cuda_mib):,.0f}" if max(cuda_mib) else "no GPU"]
        lines.append(f"| {' | '.join(cells)} |")
    speed = ratios(measurements, "train", "steps_per_second")
    verdict = "reached" if median(speed) >= SPEED_RATIO_TO_REACH else "not reached"
    return [
        *lines,
        "",
        f"- steps/s, ratio to stable-baselines3 to reach: {SPEED_RATIO_TO_REACH}, measured: "
        f"{measuring.median_and_extremes(speed)}: {verdict}",
        f"- peak memory of the whole process, ratio to stable-baselines3: "
        f"{measuring.median_and_extremes(ratios(measurements, 'train', 'rss_mib'))}",
    ]


def bytes_per_transition(kind: str, args: Args) -> float:
    """Returns what the arrays of a replay memory take for each transition, of one of MEMORIES."""
    size = 100 * args.num_envs
    memory = make_memory(kind, size, args, "cpu")
    arrays = memory.columns if kind == "ours" else vars(memory)
    # Counted are the arrays of numpy and torch that are as long as the memory.
    return sum(x.nbytes for x in arrays.values() if getattr(x, "shape", ())[:1] == (size // args.num_envs,)) / size


def memory_table(args: Args) -> list[str]:
    """Returns the lines on full replay memories, computed, and the comparison with the ratio to reach."""
    head = " | ".join(f"{size:,} transitions, MiB" for size in SIZES)
    lines = [f"| replay memory | bytes/transition | {head} | dqn_atari.py's to it |", "|---|---:|---:|---:|---:|"]
    needs = {kind: bytes_per_transition(kind, args) for kind in MEMORIES}
    for kind, name in MEMORIES.items():
        mib = " | ".join(f"{size * needs[kind] / 2**20:,.0f}" for size in SIZES)
        lines.append(f"| {name} | {needs[kind]:,.0f} | {mib} | {needs['ours'] / needs[kind]:.3f} |")
    reached = needs["ours"] / needs["sb3"]
    verdict = "reached" if reached <= MEMORY_RATIO_TO_REACH else "not reached"
    return [*lines, "", f"- ratio to reach: at most {MEMORY_RATIO_TO_REACH}, computed: {reached:.3f}: {verdict}"]


def sample_table(measurements: list[Measurement]) -> list[str]:
    """Returns the lines on sampling, medians over rounds, and the comparison with the time to reach."""
    lines = [
        "| replay memory | batch goes to | ms, median | ms, 90 % quantile | resident memory grew by, MiB |",
        "|---|---|---:|---:|---:|",
    ]
    for task in ("sample", "sample_to_gpu"):
        for program in PROGRAMS if any(m.task == task for m in measurements) else ():
            names = ("sample_ms", "sample_ms_90", "growth_mib")
            ms, ms_90, growth = (median(of_program(measurements, task, program, name)) for name in names)
            where = "CPU" if task == "sample" else "GPU"
            lines.append(f"| {MEMORIES[program]} | {where} | {ms:.3f} | {ms_90:.3f} | {growth:,.0f} |")
    ms, ms_90 = (median(of_program(measurements, "sample", "ours", name)) for name in ("sample_ms", "sample_ms_90"))
    verdict = "reached" if ms <= SAMPLE_MS_TO_REACH else "not reached"
    found = f"median {ms:.3f}, 90 % quantile {ms_90:.3f}"
    return [*lines, "", f"- ms to reach on the CPU: at most {SAMPLE_MS_TO_REACH:g}, measured: {found}: {verdict}"]


def report(args: Args, measurements: list[Measurement], load: float) -> str:
    """Returns the report in Markdown."""
    packages = ("torch", "gymnasium", "ale-py", "stable-baselines3")
    passed = [f"--{x.replace('_', '-')}" for x in ("compile", "amp", "replay_on_device") if getattr(args, x)]
    common = math.gcd(args.train_frequency, args.num_envs)
    lines = [
        f"# Speed and memory of dqn_atari.py, {args.env_id}",
        "",
        *measuring.heading("speed_dqn.py", packages, measurements[0].device, load),
        f"- Threads: {args.threads}, for sampling 1; further flags of dqn_atari.py: {' '.join(passed) or 'none'}",
        f"- Steps are agent steps over all environments, 4 frames each; seed {SEED}.",
        f"- Rounds in alternation: {args.rounds}.",
        "",
        f"## Training with {args.num_envs} environments and a full replay memory of {args.buffer_size:,} transitions",
        "",
        f"A batch of {BATCH_SIZE} in {args.train_frequency} steps (stable-baselines3: train_freq="
        f"{args.train_frequency // common}, gradient_steps={args.num_envs // common}), the target network copied "
        f"in {TARGET_INTERVAL:,} steps, epsilon {EPSILON}.",
        f"Each measurement: {args.buffer_size:,} steps fill the memory, {args.untimed_steps:,} learn untimed, then "
        "come the timed ones.",
        "",
        *speed_table(measurements),
        "",
        "## Size of a full replay memory",
        "",
        *memory_table(args),
        "",
        f"## One batch of {BATCH_SIZE} from a full replay memory of {args.sample_size:,} random transitions",
        "",
        f"{SAMPLES:,} calls in each round, on one thread.",
        "",
        *sample_table(measurements),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the command line: status 0 when done, 2 when the arguments are wrong or the memory is too small."""
    args = tyro.cli(Args)
    args = dataclasses.replace(args, threads=args.threads or measuring.num_cores())
    # The processes of the measurements inherit this path.
    sys.path.insert(0, str(measuring.ROOT))
    import torch

    import dqn_atari

    try:
        if not dqn_atari.is_atari(dqn_atari.find_spec(args.env_id)):
            raise dqn_atari.UsageError(f"--env-id {args.env_id}: this is no Atari game")
        # Now rather than in the middle.
        largest = max(("sample_size", "buffer_size"), key=lambda name: getattr(args, name))
        num_bytes = int(getattr(args, largest) * bytes_per_transition("sb3", args))
        dqn_atari.check_memory(num_bytes, torch.device("cpu"), largest.replace("_", "-"))
        measuring.publish(measure_all(args), partial(report, args), args.out)
    except (dqn_atari.UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
