# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.13.0", "gymnasium>=1.4.0", "tyro>=1.0.16", "tensorboard>=2.21.0", "numpy>=2.1.0", "imageio>=2.34.0",
#     "imageio-ffmpeg>=0.6.0", "psutil>=5.9.8", "tqdm>=4.66.3", "matplotlib>=3.10.8",
#     'pybullet>=3.2.7; python_version < "3.12" and sys_platform == "linux" and platform_machine == "x86_64"',
#     'pybullet-arm64>=3.2.8; python_version >= "3.12" and python_version < "3.14" and sys_platform == "linux" and platform_machine == "x86_64"',  # noqa: E501
#     'pybullet-arm64>=3.2.8; python_version < "3.14" and sys_platform != "linux"',
# ]
# ///
"""REINFORCE, the Monte Carlo policy gradient, on vector observations and discrete actions.

Paper: Williams 1992, https://doi.org/10.1007/BF00992696.
Run:   python reinforce_bullet_cartpole.py, with the folder envs/ beside it
Shapes: N envs, E episodes of an update, T steps of an episode or of all E, O observation dims, A actions.
Differs from the paper: rewards after an action are discounted, and their sums normalised over the update by default;
        Adam takes the steps. The factor gamma^t, by which the gradient of the discounted return weighs step t, is left
        out, as everyone does.

A truncated episode is learned from as if nothing came after its end, since there is no critic to say what would. So
returns near a time limit are too small. The baseline is the mean return of the update's other episodes at the same
step, too small by as much where those reach the limit too; without it an agent that always reaches the limit is told
that its last actions are worth less than its first ones, and unlearns what it could. The share of truncated episodes
is logged, and --skip-truncated leaves them out, which has a price too: where the good episodes are those that are cut,
it learns from the bad ones.
"""

import difflib
import importlib.util
import itertools
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import zipfile
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import psutil
import torch
import tyro
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import envs as bullet_envs  # noqa: F401 (registers BulletCartPole-v0)


# ----- Arguments -----
@dataclass(frozen=True)
class Args:
    """REINFORCE on the cart-pole, and on others with vector observations and discrete actions."""

    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seeds python, numpy, torch, the environments and their action spaces
    torch_deterministic: bool = True  # deterministic kernels: on a CPU the same command gives the same weights
    cuda: bool = True  # use a CUDA device where there is one, else the CPU
    threads: int = 1  # CPU threads; 0: one for each core, for torch at most 8
    run_dir: str = "runs"  # parent folder of the run folders
    checkpoint_every: int = 50_000  # environment steps between checkpoints; 0: only at evaluations and on interruption
    eval_every: int = 20_000  # environment steps between evaluations during training; 0: only at the end
    eval_episodes: int = 10  # episodes of each evaluation
    eval_greedy: bool = True  # evaluate with the best, most probable or mean action; off: sampled or epsilon-greedy
    resume: str | None = None  # continue a run from its folder or from a checkpoint file
    evaluate: str | None = None  # evaluate the checkpoint in this file or run folder, print the result, exit
    capture_video: bool = False  # write MP4 files of evaluation episodes to the run's videos/
    track: bool = False  # mirror the run to Weights & Biases
    wandb_project_name: str = "onefile-rl"  # project on Weights & Biases
    wandb_entity: str | None = None  # team on Weights & Biases
    progress: bool = True  # show a progress bar
    plot: bool = False  # at the end draw the returns of the episodes, and their moving average, to returns.png

    env_id: str = "BulletCartPole-v0"  # any id that gymnasium.make takes, package.module:Id-v0 included
    env_kwargs: str = "{}"  # keyword arguments for gymnasium.make, a JSON object
    vector: Literal["sync", "async"] = "sync"  # gymnasium's environments step in this process, or in one each
    num_envs: int = 4  # parallel environments, N
    max_episode_steps: int | None = None  # time limit in place of the environment's own, in steps; 0: 27,000

    total_episodes: int = 600  # episodes of the whole run
    learning_rate: float = 1e-2  # step size of the optimizer
    learning_rate_final: float = 1e-3  # step size at the end, to which it goes linearly over the episodes of the run
    gamma: float = 0.99  # discount of a reward one step later
    hidden_sizes: tuple[int, ...] = (128,)  # units of each hidden layer

    episodes_per_update: int = 4  # whole episodes that each update learns from, E
    norm_returns: bool = True  # normalise each update's returns, less the baseline, to mean 0, standard deviation 1
    baseline: bool = True  # subtract the other episodes' mean return at the same step, for a gradient of less variance
    skip_truncated: bool = False  # learn nothing from episodes that a time limit cut off

    def check(self) -> None:
        """Raises a UsageError where a value is out of range or does not fit another one."""
        limits = {
            "eval_episodes total_episodes episodes_per_update": (1, math.inf),
            "num_envs hidden_sizes": (1, 10_000),
            "threads": (0, 1_024),
            "checkpoint_every eval_every max_episode_steps": (0, math.inf),
            "learning_rate": (1e-12, 1),
            "learning_rate_final gamma": (0, 1),
            "seed": (0, 2_000_000_000),  # evaluations add to it, and some environments take 31 bits
        }
        check_limits(self, limits)


# ----- Environment -----
def find_spec(env_id: str) -> EnvSpec:
    """Returns the registered specification of an environment; `package.module:Id-v0` imports the module first."""
    module, _, name = env_id.rpartition(":")
    importlib.import_module(module or "gymnasium")
    if name not in gym.registry:
        usable = [x for x, spec in gym.registry.items() if not isinstance(spec.kwargs.get("frameskip"), tuple)]
        near = ", ".join(difflib.get_close_matches(name, usable, n=5, cutoff=0.3)) or "none"
        raise UsageError(f"gymnasium has no {name!r}; the nearest ids: {near}; yours: module:Id-v0; Atari: *_atari.py")
    return gym.registry[name]


class WholeEpisodes(gym.Wrapper):
    """Reports the true scores of whole episodes, which RecordEpisodeStatistics counts below what cuts or clips them.

    "return", "length" and what the environment's last `info["measures"]` held stand in the info of the reset after it,
    since Atari's EpisodicLifeEnv steps within a reset; as a tuple, which vector environments pass on as it is.
    """

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode, and reports the one before if it ended; a seed is the action space's too."""
        if seed is not None:
            self.unwrapped.action_space.seed(seed)
        self.action_type, self.first_action = self.action_space.dtype.type, getattr(self.action_space, "start", 0)
        obs, _ = self.env.reset(seed=seed, options=options)
        if not np.isfinite(obs).all():
            raise FloatingPointError(f"{self.spec.id} is not finite at a reset: obs {obs}")
        scores, lengths = self.get_wrapper_attr("return_queue"), self.get_wrapper_attr("length_queue")
        if not scores:
            return obs, {}
        measures = [x for x in self.info.get("measures", {}).items() if math.isfinite(x[1])]
        return obs, {"whole_episode": (("return", scores.pop()), ("length", lengths.pop()), *measures)}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Takes a step; actions have the space's own type, but a Discrete's count from 0 wherever they start."""
        obs, reward, terminated, truncated, self.info = self.env.step(self.action_type(action + self.first_action))
        if not (math.isfinite(reward) and np.isfinite(obs).all()):
            raise FloatingPointError(f"{self.spec.id} is not finite in a step: reward {reward}, obs {obs}")
        return obs, reward, terminated, truncated, {}


def finished_episodes(infos: dict[str, Any]) -> dict[int, dict[str, float]]:
    """Returns "return", "length" and measures of each whole episode that ended in this step, by its environment."""
    return {i: dict(episode) for i, episode in enumerate(infos.get("whole_episode", [])) if episode is not None}


def time_limit(args: Args) -> int:
    """Returns the steps after which an episode is cut off: the flag's, else the id's, else EVAL_MAX_STEPS."""
    limit = find_spec(args.env_id).max_episode_steps if args.max_episode_steps is None else args.max_episode_steps
    return limit or EVAL_MAX_STEPS


def make_env(args: Args, render_mode: str | None = None, training_pid: int | None = None) -> gym.Env:
    """Returns an environment that shows vectors (O,) and takes one of A actions."""
    if training_pid not in (None, os.getpid()):
        # Ctrl-C reaches an environment's own process too, and is the training process's to handle.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Not every environment takes the keyword, so it is left out where nothing is drawn.
    keywords = json.loads(args.env_kwargs) | ({"render_mode": render_mode} if render_mode else {})
    env = gym.make(find_spec(args.env_id), **{"max_episode_steps": time_limit(args), **keywords})
    space, actions = env.observation_space, env.action_space
    fits = isinstance(space, gym.spaces.Box) and len(space.shape) == 1 and isinstance(actions, gym.spaces.Discrete)
    found = " and ".join(f"{type(x).__name__} {x.shape} {x.dtype}" for x in (space, actions))
    others = "ppo_cartpole.py takes vectors and Discrete actions, ppo_continuous.py vectors and Box, *_atari.py"
    require(fits, f"it has {found}; {others} uint8 images from 36 x 36 on and Discrete; envs/README.md tells more")
    return WholeEpisodes(RecordEpisodeStatistics(env, stats_key="whole_episode"))


def make_envs(args: Args, num_envs: int, render_mode: str | None = None) -> VectorEnv:
    """Returns parallel environments, for training and evaluation alike."""
    make = AsyncVectorEnv if args.vector == "async" else SyncVectorEnv
    envs = make([partial(make_env, args, render_mode, os.getpid())] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    if args.vector == "async":  # gymnasium would wait for ever where one of its processes died
        envs.close_extras = lambda **_: [process.terminate() for process in envs.processes]
    return envs


# ----- Networks -----
class Agent(nn.Module):
    """Policy, a network of ReLU layers."""

    def __init__(self, args: Args, envs: VectorEnv) -> None:
        super().__init__()
        sizes = (envs.single_observation_space.shape[0], *args.hidden_sizes)
        hidden = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.actor = nn.Sequential(*hidden, nn.Linear(sizes[-1], int(envs.single_action_space.n)))

    def policy(self, obs: Tensor) -> Categorical:
        """Returns the policy over A actions for observations (M, O)."""
        return Categorical(logits=self.actor(obs.float()), validate_args=False)

    def act(self, obs: Tensor, greedy: bool) -> Tensor:
        """Returns the actions (M,) that environments are to take: the most probable ones, or sampled."""
        policy = self.policy(obs)
        return policy.mode if greedy else policy.sample()


# ----- Math -----
def discounted_returns(rewards: list[float], gamma: float) -> Tensor:
    """Returns (T,) the discounted sum of the rewards of an episode from each step on."""
    returns, tail = [], 0.0
    for reward in reversed(rewards):
        tail = reward + gamma * tail
        returns.append(tail)
    return torch.tensor(returns[::-1])


def less_baseline(returns: list[Tensor]) -> list[Tensor]:
    """Subtracts from each return (T,) the others' mean return at that step; an episode that has ended counts as 0.

    A time limit takes about the same from all episodes that reach it, and leaves no trace here where all do; beside
    others that ended before, it makes them look worse than they are. What an episode did has no part in its own
    baseline, so the mean of the gradient stays as it was. A single episode has the baseline 0.
    """
    padded = nn.utils.rnn.pad_sequence(returns, batch_first=True).double()  # equal returns shall leave exactly 0
    above = padded - (padded.sum(0) - padded) / max(len(returns) - 1, 1)
    return [x[: len(episode)] for x, episode in zip(above.float(), returns, strict=True)]


def normalised(x: Tensor) -> Tensor:
    """Returns (T,) with mean 0 and standard deviation 1; a single number or equal ones become 0."""
    # In float32 the mean of equal numbers need not be one of them, and what is left would be scaled up to 1.
    x = x.double()
    return ((x - x.mean()) / (x.std(correction=0) + 1e-8)).float()


def reinforce_loss(logprobs: Tensor, weights: Tensor, num_episodes: int) -> Tensor:
    """Returns what has the policy gradient as its negative gradient (Williams 1992, theorem 2).

    Logprobs (T,) of all episodes' actions are weighed by (T,) returns less a baseline, into which no gradient flows.
    Summed over the steps, and a mean over episodes: a mean over steps would count a step of a long episode less.
    """
    assert logprobs.shape == weights.shape, f"want (T,) twice, got {tuple(logprobs.shape)}, {tuple(weights.shape)}"
    return -(logprobs * weights.detach()).sum() / num_episodes


# ----- Evaluation -----
EVAL_MAX_STEPS = 27_000  # longest episode without another limit; ale-py's 108,000 frames too, with 8 steps of no-ops


def play(agent: nn.Module, args: Args, seeds: range, device: torch.device, film: Path | None) -> list[dict[str, float]]:
    """Returns an episode of each seed, played at once in this process; `film` is a folder for videos of them."""
    episodes: dict[int, dict[str, float]] = {}
    with closing(make_envs(replace(args, vector="sync"), len(seeds), "rgb_array" if film else None)) as envs:
        obs, _ = envs.reset(seed=seeds[0])
        options = {"fps": envs.metadata.get("render_fps", 30), "macro_block_size": 2}  # a deleted writer ends its film
        films = {i: imageio.get_writer(film / f"seed-{seed}.mp4", **options) for i, seed in enumerate(seeds) if film}
        while len(episodes) < len(seeds):
            stop_if_asked()
            for i in films.keys() - episodes.keys():
                films[i].append_data(envs.envs[i].render())
            action = agent.act(torch.from_numpy(obs).to(device), args.eval_greedy)
            obs, _, _, _, infos = envs.step(action.cpu().numpy())
            episodes = finished_episodes(infos) | episodes  # of each environment the first one counts, and no other
    return [episodes[i] for i in range(len(seeds))]


@torch.no_grad()
def evaluate(agent: nn.Module, args: Args, seed: int, device: torch.device, film: Path | None = None) -> dict:
    """Returns arrays over the episodes: "return", "length", measures; episode i has seed + i, film gets the first 3."""
    seeds = range(seed, seed + args.eval_episodes)
    # Training's random streams stay as they were; users' environments may draw from python's and numpy's.
    streams = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        seed_everything(seed)
        episodes = play(agent, args, seeds[:3], device, film) if film else []
        for i in range(len(episodes), len(seeds), 32):
            episodes += play(agent, args, seeds[i : i + 32], device, None)
    random.setstate(streams[0])
    np.random.set_state(streams[1])  # noqa: NPY002
    return {name: np.array([x.get(name, np.nan) for x in episodes]) for name in {n: 0 for x in episodes for n in x}}


def final_evaluation(agent: nn.Module, args: Args, folder: Path, device: torch.device) -> dict:
    """Evaluates the agent as it is on episodes that no evaluation in training plays, and prints them; films too."""
    film = folder / "videos" if args.capture_video else None
    if film:
        film.mkdir(exist_ok=True)
        print(f"videos: {film}, of the first episodes, on gymnasium's environments, which draw", flush=True)
    evaluation = evaluate(agent, args, args.seed + 20_000, device, film)
    scores, lengths = evaluation["return"], evaluation["length"]
    for i, (score, n) in enumerate(zip(scores, lengths, strict=True)):
        print(f"episode {i}: return={score:g} length={n:g}{', at the cap' if 0 <= EVAL_MAX_STEPS - n < 8 else ''}")
    numbers = {"mean": scores.mean(), "std": scores.std(), "min": scores.min(), "max": scores.max()}
    numbers |= {"episodes": len(scores), "mean_length": lengths.mean()}
    numbers |= {name: np.nanmean(x) for name, x in evaluation.items() if name not in ("return", "length")}
    print("eval:", *(f"{name}={round(float(x), 4):g}" for name, x in numbers.items()), flush=True)
    return evaluation


def evaluate_checkpoint(args: Args) -> None:
    """Evaluates the checkpoint or agent file at args.evaluate, which is not changed, and prints the result."""
    device = prepare(args)
    with closing(make_envs(args, 1)) as envs:
        agent = Agent(args, envs).to(device)
    final_evaluation(agent, args, load_checkpoint(args.evaluate, agent=agent)["folder"], device)


# ----- Training -----
def train(args: Args) -> tuple[Agent, np.ndarray]:  # noqa: C901, PLR0915 (one story, read from top to bottom)
    """Returns the trained agent and the scores of its final evaluation; args.resume goes on with a run."""
    device = prepare(args)
    with ExitStack() as cleanup:
        envs = cleanup.enter_context(closing(make_envs(args, args.num_envs)))
        agent = Agent(args, envs).to(device)
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
        # The episodes of one update. Besides the numbers of the observation python's objects take 300 bytes a step.
        per_step = envs.single_observation_space.dtype.itemsize * envs.single_observation_space.shape[0] + 300
        check_memory(args.episodes_per_update * time_limit(args) * per_step, torch.device("cpu"), "episodes-per-update")
        run = cleanup.push(Run(args, "episodes", args.total_episodes, agent=agent, optimizer=optimizer))

        env_seed: int | None = run.env_seed
        while run.counters["episodes"] < args.total_episodes:
            start_time, start_step = time.perf_counter(), run.counters["global_step"]
            change = (args.learning_rate_final - args.learning_rate) * run.counters["episodes"] / args.total_episodes
            optimizer.param_groups[0]["lr"] = args.learning_rate + change
            to_play = min(args.episodes_per_update, args.total_episodes - run.counters["episodes"])

            # Play whole episodes of one policy. Each environment starts its next one while some are left to start, and
            # all that were started count: the first that end would be the short ones.
            obs, _ = envs.reset(seed=env_seed)
            env_seed, global_step, started, truncated = None, start_step, min(args.num_envs, to_play), 0
            playing = np.arange(args.num_envs) < started
            # Of each episode (obs, action, reward) of each step.
            current, played = [[] for _ in range(args.num_envs)], []
            while playing.any():
                stop_if_asked()
                with torch.no_grad():
                    action = agent.act(torch.from_numpy(obs).to(device), greedy=False).cpu().numpy()
                next_obs, reward, termination, truncation, infos = envs.step(action)
                global_step += int(playing.sum())
                for i in np.flatnonzero(playing):
                    current[i].append((obs[i].copy(), action[i], float(reward[i])))
                for i, episode in finished_episodes(infos).items():
                    if not playing[i]:
                        continue
                    run.log_episode(global_step, episode)
                    cut = truncation[i] and not termination[i]
                    truncated += int(cut)
                    if cut and episode["length"] == EVAL_MAX_STEPS:
                        print(f"an episode without an end was cut off after {EVAL_MAX_STEPS:,} steps", flush=True)
                    if not (cut and args.skip_truncated):
                        played.append(current[i])
                    current[i], playing[i] = [], started < to_play
                    started += int(playing[i])
                obs = next_obs

            # One step along the gradient; where every episode was left out there is none.
            scalars = {"charts/learning_rate": optimizer.param_groups[0]["lr"]}
            scalars["charts/truncated_fraction"] = truncated / to_play
            if played:
                b_obs, b_actions, _ = zip(*(step for episode in played for step in episode), strict=True)
                b_obs, b_actions = (torch.from_numpy(np.array(x)).to(device) for x in (b_obs, b_actions))
                returns = [discounted_returns([reward for *_, reward in episode], args.gamma) for episode in played]
                weights = torch.cat(less_baseline(returns) if args.baseline else returns).to(device)
                weights = normalised(weights) if args.norm_returns else weights
                policy = agent.policy(b_obs)
                pg_loss = reinforce_loss(policy.log_prob(b_actions), weights, len(played))

                optimizer.zero_grad()
                pg_loss.backward()
                grad_norm = nn.utils.get_total_norm([x.grad for x in agent.parameters()])
                optimizer.step()
                scalars |= {"losses/policy_loss": pg_loss.item(), "losses/entropy": policy.entropy().mean().item()}
                scalars["losses/grad_norm"] = grad_norm.item()

            run.counters["global_step"] = global_step
            run.counters["episodes"] += to_play
            scalars["charts/SPS"] = (global_step - start_step) / (time.perf_counter() - start_time)
            run.log(scalars)

            last = run.counters["episodes"] >= args.total_episodes
            if args.eval_every and (last or crossed(args.eval_every, run.counters["evaluated"], global_step)):
                run.keep_best(evaluate(agent, args, args.seed + 10_000, device))
            elif last or crossed(args.checkpoint_every, start_step, global_step):
                run.save("latest.pt")

        evaluation = final_evaluation(agent, args, run.folder, device)
        if run.counters["evaluated"] < run.counters["global_step"]:
            run.keep_best(evaluation)
        return agent, evaluation["return"]


# ----- Bookkeeping -----
SCRIPT, FORMAT = Path(__file__).stem, 2  # by which a checkpoint is known
NOT_RESTORED = ("resume", "evaluate", "run_dir", "cuda", "threads", "progress", "track", "capture_video")
signals: list[int] = []  # those that came: the first ends the run at the next `stop_if_asked`, a second at once


class UsageError(Exception):
    """What the user asked for cannot be done: one line on standard error, exit status 2."""


def require(condition: bool, message: str) -> None:
    """Raises a UsageError with the message unless the condition holds."""
    if not condition:
        raise UsageError(message)


def note_signal(signum: int, frame: object) -> None:
    """Handles Ctrl-C, SIGTERM or SIGHUP, at any moment, so it does no more than this."""
    if signals:
        os._exit(128 + signals[0])
    signals.append(signum)
    with suppress(OSError):  # the terminal may be gone
        os.write(2, b"\nstopping; a second signal ends at once\n")


def stop_if_asked() -> None:
    """Ends the program with status 128 + its number if a signal came."""
    if signals:
        raise SystemExit(128 + signals[0])


class Run:
    """Folder, log and checkpoints of `modules`, which --resume loads; the bar shows counter `unit` to `total`."""

    def __init__(self, args: Args, unit: str, total: int, **modules: Any) -> None:  # noqa: ANN401
        self.args, self.unit, self.modules, self.scores = args, unit, modules, []
        self.counters: dict[str, Any] = {"global_step": 0, "episodes": 0, "evaluated": 0, "best_eval": []}
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns() // 10**6}"  # in ms, to tell runs apart
        self.folder = Path(args.run_dir) / re.sub(r"[^\w.-]", "-", name)
        if args.resume is not None:
            self.counters, self.folder = map(load_checkpoint(args.resume, **modules).get, ("counters", "folder"))
        step = self.counters["global_step"]
        # Were the environments' seed the run's own, runs of neighbouring seeds would share most starts.
        self.env_seed = int(np.random.SeedSequence([args.seed, step]).generate_state(1)[0] % 2**30)
        if step > 0:
            seed_everything(self.env_seed)  # random streams are not stored, nor environments: new episodes start
        about = {"args": asdict(args), "command": shlex.join([Path(sys.executable).name, *sys.argv])}
        packages = ("ale-py", "pybullet", "pybullet-arm64", "box2d", "mujoco")
        versions = {d.name: d.version for x in packages for d in distributions(name=x)}
        versions |= {x.__name__: x.__version__ for x in (torch, np, gym)} | {"python": sys.version.split()[0]}
        status, head = subprocess.getstatusoutput(f"git -C {shlex.quote(Path(__file__).parent.as_posix())} rev-parse @")
        about["device"] = torch.cuda.get_device_name() if args.cuda and torch.cuda.is_available() else "cpu"
        about |= {"git_commit": None if status else head, "global_step": step, "versions": versions}
        try:
            json.dumps(about, ensure_ascii=False).encode()  # TensorBoard writes UTF-8
            if args.track:
                names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "id": self.folder.name}
                options = {"name": self.folder.name, "resume": "allow", "sync_tensorboard": True}
                importlib.import_module("wandb").init(**names, **options, config=about["args"])
            self.folder.mkdir(parents=True, exist_ok=args.resume is not None)
            [stray.unlink() for stray in self.folder.glob("*.pt.tmp")]  # those of a run that was killed
            (self.folder / "args.json").write_text(json.dumps(about, indent=2) + "\n")
        except Exception as error:  # wandb may raise anything
            raise UsageError(f"--run-dir {args.run_dir}{' --track' * args.track}: {error}") from error
        self.writer = SummaryWriter(str(self.folder), purge_step=step + 1, flush_secs=5)  # drops what came later
        rows = "\n".join(f"|{name}|{value}|" for name, value in about["args"].items())
        self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}", step)
        state = "this run is finished" if self.counters[unit] >= total else "going on" if args.resume else "a new run"
        print(f"run folder: {self.folder}\n{state}, at step {step:,}", flush=True)
        bar = {"total": total, "initial": self.counters[unit], "disable": not args.progress, "delay": 1}
        bar |= {} if sys.stderr.isatty() else {"mininterval": 30, "miniters": 1, "bar_format": "{l_bar}{r_bar}\n"}
        self.bar = tqdm(unit=f" {unit.removeprefix('global_')}", nrows=20, **bar)  # some containers' terminals have 0

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A signal to all processes of the run ends environment processes too, which reads as a broken pipe.
        interrupted = signals and kind and issubclass(kind, SystemExit | EOFError | ConnectionError)
        if interrupted:
            self.save("latest.pt")
        with suppress(OSError):  # the terminal may be gone, the disk full
            self.bar.close()
            self.writer.close()
            folder, parent = (shlex.quote(path.as_posix()) for path in (self.folder, self.folder.parent))
            if interrupted:
                command = f"{shlex.quote(sys.executable)} {shlex.quote(sys.argv[0])} --resume {folder}"
                print(f"interrupted at step {self.counters['global_step']:,}; go on with: {command}", flush=True)
            elif not kind:
                if self.args.plot:
                    plot_returns(self.folder)
                print(f"run folder: {folder}\nlook at it: tensorboard --logdir {parent}", flush=True)
        if interrupted:
            raise SystemExit(128 + signals[0]) from None

    def log(self, scalars: dict[str, float]) -> None:
        """Writes scalars at the global step, and moves the progress bar on."""
        step = self.counters["global_step"]
        for name, value in scalars.items():
            if not math.isfinite(value):
                raise FloatingPointError(f"{name} is not finite at step {step:,}: lower --learning-rate")
            self.writer.add_scalar(name, value, step)
        self.writer.flush()
        self.bar.update(self.counters[self.unit] - self.bar.n)

    def log_episode(self, step: int, episode: dict[str, float]) -> None:
        """Writes score, length and measures of an episode that ended in training, at its own step."""
        for name, value in episode.items():
            tag = f"charts/episodic_{name}" if name in ("return", "length") else f"charts/{name}"
            self.writer.add_scalar(tag, value, step)
        self.scores = [*self.scores[-99:], episode["return"]]
        self.bar.set_postfix_str(f"return {np.mean(self.scores):.1f}", refresh=False)

    def keep_best(self, evaluation: dict, rank: list[float] | None = None) -> None:
        """Logs an evaluation; writes `best.pt` if none had a higher rank (None: mean return); a tie keeps the newer."""
        rank = rank or [float(evaluation["return"].mean())]
        means = {f"eval/{name}_mean": np.nanmean(values) for name, values in evaluation.items()}
        self.log(means | {"eval/return_std": evaluation["return"].std()})
        self.counters["evaluated"] = self.counters["global_step"]
        if rank >= self.counters["best_eval"]:
            self.counters["best_eval"] = rank
            self.save("best.pt")
        self.save("latest.pt")

    def save(self, name: str) -> None:
        """Writes a checkpoint; at any moment the file is whole, the old or the new one."""
        if not all(x.isfinite().all() for x in self.modules["agent"].state_dict().values()):
            raise FloatingPointError(f"a weight is not finite at step {self.counters['global_step']:,}: lower the rate")
        content = {"script": SCRIPT, "format_version": FORMAT, "args": asdict(self.args), "counters": self.counters}
        content |= {key: x.state_dict() for key, x in self.modules.items() if key != "replay" or name == "latest.pt"}
        self.writer.flush()
        temporary = self.folder / f"{name}.tmp"
        try:
            with open(temporary, "wb") as file:
                torch.save(content, file)
                os.fsync(file.fileno())
        except RuntimeError as error:  # so torch tells a full disk
            raise OSError(f"{temporary} cannot be written: {error}") from error
        os.replace(temporary, self.folder / name)


def plot_returns(folder: Path) -> None:
    """Draws the returns of a run's episodes, and the mean of the last 100 at each, to its `returns.png`."""
    from matplotlib.figure import Figure
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events, tag = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload(), "charts/episodic_return"
    points = events.Scalars(tag) if tag in events.Tags()["scalars"] else []
    steps, returns = [point.step for point in points], [point.value for point in points]
    averages = [np.mean(returns[max(0, end - 100) : end]) for end in range(1, len(returns) + 1)]
    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    axes.plot(steps, returns, ".", steps, averages, "k-", markersize=3)
    axes.legend(["episode", "mean of the last 100"])
    axes.set(title=folder.name, xlabel="environment steps", ylabel="return")
    axes.figure.savefig(folder / "returns.png", dpi=150)
    print(f"plot: {folder / 'returns.png'}")


def load_checkpoint(path: str, **modules: Any) -> dict[str, Any]:  # noqa: ANN401
    """Returns what a checkpoint, or a run folder's `latest.pt`, holds, and its "folder"; loads it into the modules."""
    file = Path(path) / "latest.pt" if os.path.isdir(path) else Path(path)  # "" is none, unlike Path("")
    try:
        archive = zipfile.ZipFile(file)  # torch checks no CRC, and reads noise where an entry is marked as a folder
        require(archive.testzip() is None and not any(x.external_attr for x in archive.filelist), "damaged or foreign")
        content = torch.load(file, map_location="cpu", weights_only=True)
        made_by = f"{content.get('script')}.py, format {content.get('format_version')}"
        require(made_by == f"{SCRIPT}.py, format {FORMAT}", f"it was made by {made_by}")
        require(content["counters"].keys() >= {"global_step", "best_eval"}, "its counters are not whole")
        require(all(x.isfinite().all() for x in content["agent"].values()), "a weight is not finite")
        for x, y in vars(Args()).items():
            require(y is None or isinstance(content["args"].get(x, y), type(y) | int), f"its {x} is of another type")
        for name in [x for x in modules if x != "replay" or x in content]:
            require(name in content, f"it has no {name}: an agent file can be evaluated, not resumed")
            modules[name].load_state_dict(content[name])
            for p, kept in getattr(modules[name], "state", {}).items():
                require(all(x.shape == (p.shape, ())[k == "step"] for k, x in kept.items()), f"{name} has other shapes")
    except Exception as error:  # a damaged or foreign file may raise anything, one that holds code an UnpicklingError
        raise UsageError(f"{path}: no checkpoint that fits: {str(error).split('. ')[0]}") from error
    return content | {"folder": file.parent}


def crossed(every: int, before: int, after: int) -> bool:
    """Says whether a multiple of `every` lies in (before, after]; never for 0."""
    return every > 0 and after // every > before // every


def check_limits(args: Args, limits: dict[str, tuple[float, float]]) -> None:
    """Raises a UsageError unless each named argument lies between the two numbers; None passes."""
    for names, (least, most) in limits.items():
        for name in names.split():
            for value in np.ravel(getattr(args, name)):  # one, or those of a tuple
                message = f"--{name.replace('_', '-')} {value} must be between {least:,} and {most:,}"
                require(value is None or (least <= value <= most and value < math.inf), message)


def check_memory(num_bytes: int, device: torch.device, flag: str) -> None:
    """Says what the storage takes; raises a UsageError, which names the flag, if the device has less free memory."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    print(sizes := f"storage: {num_bytes / 2**20:,.1f} MiB; free on {device}: {free / 2**20:,.1f} MiB", flush=True)
    require(num_bytes <= free, f"{sizes}; lower --{flag}")


def seed_everything(seed: int) -> None:
    """Seeds the global generators of python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def prepare(args: Args) -> torch.device:
    """Checks arguments and environment, seeds all generators, sets threads and determinism, and returns the device."""
    args.check()
    for package in ["wandb"] * args.track + ["matplotlib"] * args.plot:
        require(importlib.util.find_spec(package), f"--track, --plot: a package is missing: pip install {package}")
    torch.set_num_threads(args.threads or min(torch.get_num_threads(), 8))
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    doing = f"--env-id {args.env_id} with --env-kwargs {args.env_kwargs} cannot be used"
    try:  # better known before hours of training
        with closing(make_envs(args, 1, "rgb_array" if args.capture_video else None)) as envs:
            envs.reset(seed=args.seed)
            require(not args.capture_video or np.ndim(envs.render()[0]) == 3, "it draws no pictures")
        if getattr(args, "compile", False) and args.evaluate is None:
            doing = "--compile needs a C++ compiler"
            torch.compile(torch.neg)(torch.zeros(2, device=device))
    except Exception as error:  # environments and compilers may raise anything
        raise UsageError(f"{doing}: {type(error).__name__}: {error}".replace("UsageError: ", "")) from error
    seed_everything(args.seed)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, and nothing here reads unset memory
    torch.backends.cudnn.benchmark = not args.torch_deterministic
    print(f"device: {torch.cuda.get_device_name() if device.type == 'cuda' else device}")
    print("environment:", args.num_envs, "x", args.env_id, find_spec(args.env_id).kwargs | json.loads(args.env_kwargs))
    return device


def main() -> None:
    """Runs the command line: status 0 when done, 1 when the run failed, 2 when the arguments are wrong."""
    sys.path.append(os.getcwd())
    sys.stdout.reconfigure(errors="replace")  # what the terminal has no letter for
    # TensorBoard raises again, in this thread, what its writing thread met on a full disk.
    threading.excepthook = lambda hook: None if issubclass(hook.exc_type, OSError) else threading.__excepthook__(hook)
    for signum in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):  # Windows has no SIGHUP
        if signal.getsignal(signum) != signal.SIG_IGN:  # as nohup has it
            signal.signal(signum, note_signal)
    try:
        args = tyro.cli(Args)
        for path in [x for x in (args.resume, args.evaluate) if x is not None]:
            stored = load_checkpoint(path)["args"]  # those of that run, which the command line overrides
            for name in stored.keys() - vars(Args()).keys():
                print(f"{path}: left out {name}={stored.pop(name)}: this script has no such argument", file=sys.stderr)
            args = tyro.cli(Args, default=Args(**{x: stored[x] for x in stored if x not in NOT_RESTORED}))
            require(args.evaluate or args.seed == stored.get("seed"), f"--seed {args.seed}: a run keeps its own")
        train(args) if args.evaluate is None else evaluate_checkpoint(args)
    except (UsageError, FloatingPointError, MemoryError, torch.OutOfMemoryError, OSError, EOFError) as error:
        reason = "a pipe broke: has an environment died?" if isinstance(error, EOFError | ConnectionError) else error
        print("error:", *str(reason).split(), file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
