"""Proximal Policy Optimization (PPO) on vector observations with a number of actions: the script to read first.

Paper: Schulman et al. 2017, https://arxiv.org/abs/1707.06347.
Run:   python ppo_cartpole.py --env-id CartPole-v1
Shapes: T steps, N envs, B = T * N, M minibatch, O observation dims, A actions; index t is the transition from obs[t].
`train` tells the story. What is no part of the algorithm, as environments, evaluation and files, is below Bookkeeping.
Differs from the paper: advantages are normalised in each minibatch, gradients clipped by their norm; a time limit is no
        end of the task, so the last value of a truncated episode is bootstrapped.
"""

import argparse
import ctypes
import dataclasses
import difflib
import importlib.metadata
import importlib.util
import io
import json
import math
import os
import pickle
import platform
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import ale_py
import gymnasium as gym
import numpy as np
import psutil
import torch
import tyro
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


# ----- Arguments -----
@dataclass(frozen=True)
class Args:
    """PPO on environments with vector observations and a number of actions."""

    exp_name: str = Path(__file__).stem
    """name of the experiment, part of the run folder's name"""
    seed: int = 1
    """seeds python, numpy, torch, the environments and their action spaces"""
    torch_deterministic: bool = True
    """deterministic kernels: the same command gives the same weights, bit for bit on a CPU"""
    cuda: bool = True
    """use a CUDA device where there is one, else the CPU"""
    threads: int = 1
    """CPU threads; 0: one for each core, for torch at most 8"""
    run_dir: str = "runs"
    """parent folder of the run folders"""
    checkpoint_every: int = 25_000
    """environment steps between checkpoints; 0: only at the end and on interruption"""
    eval_every: int = 10_000
    """environment steps between evaluations during training; 0: only at the end"""
    eval_episodes: int = 10
    """episodes of each evaluation"""
    eval_greedy: bool = True
    """evaluate with the most probable or the mean action; off: sampled from the policy"""
    resume: str | None = None
    """continue a run from its folder or from a checkpoint file"""
    evaluate: str | None = None
    """evaluate the checkpoint in this file or run folder, print the result, exit"""
    capture_video: bool = False
    """write MP4 files of evaluation episodes to the run's videos/"""
    plot: bool = False
    """at the end of a run draw the returns of its episodes, with their moving average, to the run's returns.png"""
    track: bool = False
    """mirror the run to Weights & Biases"""
    wandb_project_name: str = "onefile-rl"
    """project on Weights & Biases"""
    wandb_entity: str | None = None
    """team on Weights & Biases"""
    progress: bool = True
    """show a progress bar where the output is a terminal"""

    env_id: str = "CartPole-v1"
    """any id that gymnasium.make takes, package.module:Id-v0 included"""
    vector: Literal["sync", "async"] = "sync"
    """how environments that gymnasium makes step: in this process, or in one process each"""
    num_envs: int = 8
    """parallel environments, N"""

    num_steps: int = 128
    """steps of each environment in one rollout, T"""

    total_timesteps: int = 100_000
    """environment steps of the whole run, over all environments"""
    learning_rate: float = 1e-3
    """step size of Adam"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0 over the run"""
    gamma: float = 0.99
    """discount of a reward one step later"""

    num_minibatches: int = 8
    """minibatches of one pass over the batch; B / num_minibatches samples each"""
    update_epochs: int = 10
    """passes over each batch"""
    gae_lambda: float = 0.95
    """lambda of GAE: 0 is one-step TD (low variance), 1 is Monte Carlo (no bias)"""
    clip_coef: float = 0.2
    """epsilon of the paper's equation 7; usually 0.1 to 0.3"""
    ent_coef: float = 0.0
    """weight of the entropy bonus; usually 0 to 0.05"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """longest gradient; longer ones are scaled down to it"""

    @property
    def batch_size(self) -> int:
        """Samples of one rollout, B."""
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        """Whole iterations of the run: a rollout and its update each."""
        return self.total_timesteps // self.batch_size

    def __post_init__(self) -> None:
        check_range(self, "num_envs num_steps num_minibatches update_epochs eval_episodes", least=1)
        check_range(self, "threads checkpoint_every eval_every ent_coef vf_coef", least=0)
        check_range(self, "gamma gae_lambda", least=0, most=1)
        check_range(self, "learning_rate clip_coef max_grad_norm", above=0)
        # Evaluations seed their episodes further up, and ale-py takes 31 bits.
        check_range(self, "seed", least=0, most=2_000_000_000)
        if self.batch_size % self.num_minibatches or self.batch_size == self.num_minibatches:
            rule = f"must divide num_envs * num_steps = {self.batch_size} into minibatches of 2 samples or more"
            raise ValueError(f"--num-minibatches {self.num_minibatches} {rule}")
        if self.num_iterations < 1:
            rule = f"must be at least num_envs * num_steps = {self.batch_size}, one iteration"
            raise ValueError(f"--total-timesteps {self.total_timesteps} {rule}")


# ----- Networks -----
def layer_init(layer: nn.Module, std: float = 2**0.5, bias_const: float = 0.0) -> nn.Module:
    """Returns the layer with orthogonal weights of gain `std` and constant biases."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    """Actor and critic, two separate networks of O -> 64 -> 64 -> A and 1, with tanh between the layers."""

    def __init__(self, obs_dim: int, num_actions: int) -> None:
        super().__init__()

        def network(outputs: int, std: float) -> nn.Sequential:
            first, second = layer_init(nn.Linear(obs_dim, 64)), layer_init(nn.Linear(64, 64))
            return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), layer_init(nn.Linear(64, outputs), std))

        # A small gain starts the policy near uniform, so that early actions explore.
        self.actor, self.critic = network(num_actions, std=0.01), network(1, std=1)

    def policy(self, obs: Tensor) -> Categorical:
        """Returns the distribution of the actions (M,) for observations (M, O)."""
        return Categorical(logits=self.actor(obs.float()), validate_args=False)

    def value(self, obs: Tensor) -> Tensor:
        """Returns the values (M,) of observations (M, O)."""
        return self.critic(obs.float()).squeeze(-1)

    def act(self, obs: Tensor, greedy: bool) -> Tensor:
        """Returns the actions (M,) that environments are to take: the most probable ones, or sampled."""
        policy = self.policy(obs)
        return policy.logits.argmax(-1) if greedy else policy.sample()


# ----- Math -----
def gae_advantages(
    rewards: Tensor, values: Tensor, next_values: Tensor, ends: tuple[Tensor, Tensor], gamma: float, gae_lambda: float
) -> Tensor:
    """Returns the advantages (T, N) of generalised advantage estimation (Schulman et al. 2016, equation 16).

    All tensors are (T, N). `ends` has two: 1 at terminations, after which there is nothing to bootstrap from, and 1 at
    all ends of episodes, time limits too, at which the sum stops.
    """
    terminations, dones = ends
    deltas = rewards + gamma * next_values * (1 - terminations) - values
    advantages, tail = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        tail = deltas[t] + gamma * gae_lambda * (1 - dones[t]) * tail
        advantages[t] = tail
    return advantages


def policy_loss(new_logprobs: Tensor, logprobs: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    """Returns the negated clipped objective, the paper's equation 7, as a mean over (M,) samples."""
    ratio = (new_logprobs - logprobs).exp()
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)).mean()


# ----- Training -----
LOSS_NAMES = ("value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm")


def train(args: Args) -> tuple[Agent, list[float]]:  # noqa: PLR0915 (one story, read from top to bottom)
    """Trains, evaluates and saves an agent, or goes on with the run that args.resume names.

    Returns:
        The agent, and the scores of the final evaluation.

    Raises:
        UsageError: the arguments do not fit the environment, the machine or the checkpoint.
        Interrupted: by Ctrl-C or SIGTERM, after a checkpoint was written.
        FloatingPointError: a number of the environment or a loss is not finite; the last checkpoint stays as it was.
    """
    device = prepare(args)
    with ExitStack() as cleanup:
        stop = cleanup.enter_context(StopSignal())
        envs = cleanup.enter_context(closing_envs(make_envs(args, args.num_envs, training=True)))
        agent = make_agent(args, envs, device)
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
        modules = {"agent": agent, "optimizer": optimizer}
        run, counters, obs = begin(args, envs, modules, device, stop, cleanup)

        for iteration in range(counters["iteration"] + 1, args.num_iterations + 1):
            start_time, start_step = time.perf_counter(), counters["global_step"]
            left = 1 - (iteration - 1) / args.num_iterations if args.anneal_lr else 1
            optimizer.param_groups[0]["lr"] = args.learning_rate * left

            # Collect T steps from each of the N environments.
            steps, episodes = [], []
            for t in range(args.num_steps):
                stop.check()
                with torch.no_grad():
                    policy = agent.policy(torch.as_tensor(obs, device=device))
                    sample = policy.sample()
                action, logprob = sample.cpu().numpy(), policy.log_prob(sample).cpu().numpy()
                next_obs, reward, termination, truncation, infos = envs.step(action)
                done = termination | truncation
                # Where an episode ended, next_obs is already the start of the next one.
                final_obs = true_next_obs(next_obs, done, infos)
                global_step = start_step + (t + 1) * args.num_envs
                where = f"at step {global_step:,}"
                check_finite(where, reward=reward, observation=next_obs, final_observation=final_obs)
                steps.append((obs, final_obs, action, logprob, reward.astype(np.float32), termination, done))
                episodes += [(global_step, score, length) for score, length in finished_episodes(infos)]
                obs = next_obs

            # The targets, all (T, N), of T tuples of (N, ...).
            columns = (torch.as_tensor(np.stack(column), device=device) for column in zip(*steps, strict=True))
            all_obs, all_next_obs, actions, logprobs, rewards, terminations, dones = columns
            with torch.no_grad():
                values, next_values = agent.value(all_obs), agent.value(all_next_obs)
            ends = (terminations.float(), dones.float())
            advantages = gae_advantages(rewards, values, next_values, ends, args.gamma, args.gae_lambda)
            returns = advantages + values

            # (T, N, ...) -> (B, ...), then several passes in random minibatches.
            batch = [x.flatten(0, 1) for x in (all_obs, actions, logprobs, advantages, returns)]
            losses = []
            for _ in range(args.update_epochs):
                for mb_inds in torch.randperm(args.batch_size, device=device).chunk(args.num_minibatches):
                    mb_obs, mb_actions, mb_logprobs, mb_advantages, mb_returns = (x[mb_inds] for x in batch)
                    policy = agent.policy(mb_obs)
                    new_logprobs = policy.log_prob(mb_actions)
                    mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                    pg_loss = policy_loss(new_logprobs, mb_logprobs, mb_advantages, args.clip_coef)
                    v_loss = 0.5 * (agent.value(mb_obs) - mb_returns).square().mean()
                    entropy = policy.entropy().mean()
                    optimizer.zero_grad()
                    (pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss).backward()
                    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                    optimizer.step()
                    changes = policy_change(new_logprobs.detach(), mb_logprobs, args.clip_coef)
                    losses.append(torch.stack([v_loss, pg_loss, entropy, *changes, grad_norm]).detach())

            counters["updates"] += len(losses)
            mean_losses = torch.stack(losses).mean(0).tolist()
            scalars = {f"losses/{name}": mean for name, mean in zip(LOSS_NAMES, mean_losses, strict=True)}
            scalars["losses/explained_variance"] = explained_variance(values, returns)
            scalars["charts/learning_rate"] = args.learning_rate * left
            scalars["charts/SPS"] = args.batch_size / (time.perf_counter() - start_time)
            counters.update(iteration=iteration, global_step=global_step, episodes=counters["episodes"] + len(episodes))
            end_iteration(run, scalars, episodes, start_step, device)
        return agent, finish(args, run, counters, modules, device, stop)


# ----- Bookkeeping -----
FORMAT_VERSION = 1
NOT_STORED = ("resume", "evaluate", "run_dir", "cuda", "threads", "progress", "track", "capture_video")


def find_spec(env_id: str) -> EnvSpec:
    """Returns the registered specification of an environment; `package.module:Id-v0` imports the module first.

    Raises:
        UsageError: there is no such module or id; the message names the nearest ids.
    """
    gym.register_envs(ale_py)
    module, colon, name = env_id.rpartition(":")
    if colon:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise UsageError(f"--env-id {env_id}: there is no module {error.name!r} on the import path") from error
        except (TypeError, ValueError) as error:
            raise UsageError(f"--env-id {env_id}: there is no module {module!r}, names are absolute") from error
    if name in gym.registry:
        return gym.registry[name]
    usable = [known for known, spec in gym.registry.items() if not isinstance(spec.kwargs.get("frameskip"), tuple)]
    by_length = sorted(usable, key=len)
    near = [known for known in by_length if name.split("-")[0].lower() in known.lower()] if name else []
    near += difflib.get_close_matches(name, usable, n=5)
    raise UsageError(
        f"--env-id {env_id}: there is no environment of this id"
        + (f"; the nearest: {', '.join(list(dict.fromkeys(near))[:5])}" if near else "")
    )


def check_spaces(env: gym.Env, args: Args) -> None:
    """Raises a UsageError unless observations are vectors and the action one of a number."""
    obs_space, action_space = env.observation_space, env.action_space
    # numpy writes long bounds on several lines.
    found_obs, found_actions = (" ".join(str(space).split()) for space in (obs_space, action_space))
    if not isinstance(action_space, gym.spaces.Discrete):
        hint = "; for a Box use ppo_continuous.py" if isinstance(action_space, gym.spaces.Box) else ""
        raise UsageError(f"--env-id {args.env_id}: this script wants Discrete actions, not {found_actions}{hint}")
    if not (isinstance(obs_space, gym.spaces.Box) and len(obs_space.shape) == 1):
        images = len(obs_space.shape or ()) in (2, 3)
        hint = "for images use ppo_atari.py" if images else "gymnasium.wrappers.FlattenObservation makes one of it"
        raise UsageError(f"--env-id {args.env_id}: this script wants a vector, not {found_obs}; {hint}")


def in_child_process(training_pid: int) -> None:
    """Leaves Ctrl-C to the training process, when called in an environment's own process."""
    if os.getpid() != training_pid:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def make_env(args: Args, training: bool, render_mode: str | None = None) -> Callable[[], gym.Env]:
    """Returns a factory of one environment; training and evaluation have the same."""
    training_pid = os.getpid()

    def thunk() -> gym.Env:
        in_child_process(training_pid)
        # Not every environment takes the keyword, so it is left out where nothing is drawn.
        drawing = {"render_mode": render_mode} if render_mode else {}
        env = gym.make(args.env_id, **drawing)
        check_spaces(env, args)
        # For environments that draw actions of their own.
        env.action_space.seed(args.seed)
        env = gym.wrappers.RecordEpisodeStatistics(env, stats_key="whole_episode")
        if env.action_space.start != 0:
            first, count = int(env.action_space.start), int(env.action_space.n)
            env = gym.wrappers.TransformAction(env, lambda action: action + first, gym.spaces.Discrete(count))
        return env

    return thunk


def make_envs(args: Args, num_envs: int, training: bool) -> VectorEnv:
    """Returns parallel environments."""
    # Here an unknown id is told with the nearest ones.
    find_spec(args.env_id)
    make = AsyncVectorEnv if args.vector == "async" else SyncVectorEnv
    return make([make_env(args, training)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def check_drawing(args: Args) -> None:
    """Raises a UsageError, before hours of training, if --capture-video is wanted and the environment cannot draw."""
    if not args.capture_video:
        return
    find_spec(args.env_id)
    try:
        with warnings.catch_warnings(action="ignore"):
            env = make_env(args, training=False, render_mode="rgb_array")()
    except TypeError as error:
        if "render_mode" not in str(error):
            raise
        raise UsageError(f"--capture-video: {args.env_id} takes no render_mode, so it cannot draw") from error
    modes = env.metadata.get("render_modes", [])
    if "rgb_array" in modes:
        # What draws may be a package that is missing.
        env.reset(seed=args.seed)
        env.render()
    env.close()
    if "rgb_array" not in modes:
        raise UsageError(f"--capture-video: {args.env_id} cannot draw: its render modes are {modes}, not 'rgb_array'")


def describe_envs(args: Args) -> str:
    """Returns one line on the environments."""
    return f"{args.num_envs} x {args.env_id} ({args.vector})"


def true_next_obs(next_obs: np.ndarray, done: np.ndarray, infos: dict[str, Any]) -> np.ndarray:
    """Returns (N, ...) what each step led to: the final observation where an episode ended, else the next one.

    Takes `final_obs` as gymnasium gives it, an object array with None elsewhere, and as ale-py does, one full array.
    """
    if not done.any():
        return next_obs
    true_obs = next_obs.copy()
    for i in np.flatnonzero(done):
        true_obs[i] = infos["final_obs"][i]
    return true_obs


def finished_episodes(infos: dict[str, Any]) -> list[tuple[float, int]]:
    """Returns (score, length) of each whole episode that ended in this step; a lost life alone is none."""
    final_info = infos.get("final_info", {})
    ended = np.flatnonzero(final_info.get("_whole_episode", []))
    episode = final_info.get("whole_episode", {})
    return [(float(episode["r"][i]), int(episode["l"][i])) for i in ended]


def check_finite(where: str, **arrays: np.ndarray) -> None:
    """Raises a FloatingPointError that names environment and entry if a number (N, ...) is nan or infinite."""
    for name, array in arrays.items():
        # Images are always finite, and large.
        if array.dtype != np.uint8 and not np.isfinite(array).all():
            i, *entry = (int(index) for index in np.argwhere(~np.isfinite(array))[0])
            value = array[(i, *entry)]
            raise FloatingPointError(f"environment {i} gave {name}{entry or ''} = {value} {where}")


def make_agent(args: Args, envs: VectorEnv, device: torch.device) -> Agent:
    """Returns a new agent for the spaces of the environments."""
    return Agent(envs.single_observation_space.shape[0], int(envs.single_action_space.n)).to(device)


def policy_change(new_logprobs: Tensor, logprobs: Tensor, clip_coef: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns how far the policy moved: two estimates of KL(old || new), and the share of clipped ratios, over (M,).

    The first estimate is -log(ratio), the second (ratio - 1) - log(ratio): unbiased too, never negative, and of lower
    variance (http://joschu.net/blog/kl-approx.html).
    """
    logratio = new_logprobs - logprobs
    ratio = logratio.exp()
    return (-logratio).mean(), (ratio - 1 - logratio).mean(), ((ratio - 1).abs() > clip_coef).float().mean()


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Returns 1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant; nan if Var is 0."""
    variance = returns.var(correction=0).item()
    return 1 - (returns - values).var(correction=0).item() / variance if variance > 0 else float("nan")


def check_weights(module: nn.Module, global_step: int) -> None:
    """Raises a FloatingPointError if a weight is not finite, as it is after a loss was not."""
    if not all(weights.isfinite().all() for weights in module.parameters()):
        raise FloatingPointError(f"a loss is not finite at step {global_step:,}; the run cannot go on")


EVAL_MAX_STEPS = 27_000
"""longest evaluation episode in steps; ale-py ends games there too, at 108,000 frames"""


class Evaluation(NamedTuple):
    """Whole episodes: their undiscounted scores, their lengths in steps, and what else their environments measured."""

    scores: list[float]
    lengths: list[int]
    measures: list[dict[str, float]]

    def mean_measures(self) -> dict[str, float]:
        """Returns the mean of each measure over the episodes that have it; one that was cut off has none."""
        names = dict.fromkeys(name for measured in self.measures for name in measured)
        return {name: float(np.mean([x[name] for x in self.measures if name in x])) for name in names}


def quality(evaluation: Evaluation) -> list[float]:
    """Returns by what `best.pt` is chosen: of two such lists, the first numbers that differ decide."""
    return [float(np.mean(evaluation.scores))]


def episode_measures(infos: dict[str, Any], i: int) -> dict[str, float]:
    """Returns what the episode of environment i that just ended reported as `info["measures"]`, numbers by name."""
    measures = infos.get("final_info", {}).get("measures", {})
    return {name: float(measures[name][i]) for name in measures if f"_{name}" in measures and measures[f"_{name}"][i]}


@torch.no_grad()
def evaluate(
    agent: nn.Module, envs: VectorEnv, episodes: int, seed: int, greedy: bool, device: torch.device, stop: "StopSignal"
) -> Evaluation:
    """Returns the scores and lengths of whole episodes; episode i is seeded with seed + i.

    Args:
        agent: is not changed.
        envs: of `make_envs(..., training=False)`: true rewards, whole games. Episodes are played in turns of N.
        episodes: how many.
        seed: of the first episode; torch's global generator is seeded with it too, for the sampled actions.
        greedy: take the most probable or the mean action; else sample.
        device: where the agent is.
        stop: raises where the user interrupts.

    Raises:
        FloatingPointError: a number of an environment is not finite.
    """
    torch.manual_seed(seed)
    scores, lengths = np.zeros(0), np.zeros(0, dtype=np.int64)
    measures: list[dict[str, float]] = []
    while len(scores) < episodes:
        obs, _ = envs.reset(seed=[seed + len(scores) + i for i in range(envs.num_envs)])
        score, length = np.zeros(envs.num_envs), np.zeros(envs.num_envs, dtype=np.int64)
        # Environments beyond the last episode are stepped along and not counted.
        running = np.arange(envs.num_envs) < episodes - len(scores)
        counted = int(running.sum())
        measured: list[dict[str, float]] = [{} for _ in range(counted)]
        while running.any() and length.max() < EVAL_MAX_STEPS:
            stop.check()
            action = agent.act(torch.as_tensor(obs, device=device), greedy)
            obs, reward, termination, truncation, infos = envs.step(action.cpu().numpy())
            check_finite(f"at step {length.max() + 1:,} of an evaluation", reward=reward, observation=obs)
            score[running] += reward[running]
            length[running] += 1
            for i in np.flatnonzero(running & (termination | truncation)):
                measured[i] = episode_measures(infos, i)
            running &= ~(termination | truncation)
        capped = int((length[:counted] >= EVAL_MAX_STEPS).sum())
        if capped:
            print(f"evaluation: {capped} of {counted} episodes met the cap of {EVAL_MAX_STEPS:,} steps and were cut")
        scores = np.append(scores, score[:counted])
        lengths = np.append(lengths, length[:counted])
        measures += measured
    return Evaluation(scores.tolist(), lengths.tolist(), measures)


@torch.no_grad()
def record_videos(
    agent: nn.Module, args: Args, episodes: int, seed: int, folder: Path, device: torch.device, stop: "StopSignal"
) -> None:
    """Plays episodes in an environment of its own, which can draw, and writes one MP4 file each to the folder."""
    import imageio.v2 as imageio

    env = make_env(args, training=False, render_mode="rgb_array")()
    torch.manual_seed(seed)
    folder.mkdir(exist_ok=True)
    try:
        for i in range(episodes):
            path = folder / f"seed-{seed + i}.mp4"
            with imageio.get_writer(path, fps=env.metadata.get("render_fps", 30), macro_block_size=2) as video:
                obs, _ = env.reset(seed=seed + i)
                ended, length = False, 0
                while not ended and length < EVAL_MAX_STEPS:
                    stop.check()
                    video.append_data(env.render())
                    action = agent.act(torch.as_tensor(obs, device=device).unsqueeze(0), args.eval_greedy)
                    obs, _, terminated, truncated, _ = env.step(action.cpu().numpy()[0])
                    ended, length = terminated or truncated, length + 1
                video.append_data(env.render())
            print(f"video: {path}")
    finally:
        env.close()


def evaluate_now(agent: nn.Module, args: Args, seed: int, device: torch.device, stop: "StopSignal") -> Evaluation:
    """Evaluates in fresh environments; the training's random streams stay as they were."""
    states = random_states()
    num_envs = min(args.num_envs, args.eval_episodes)
    try:
        with closing_envs(make_envs(args, num_envs, training=False)) as envs:
            return evaluate(agent, envs, args.eval_episodes, seed, args.eval_greedy, device, stop)
    finally:
        set_random_states(states)


def final_evaluation(
    agent: nn.Module, args: Args, folder: Path, device: torch.device, stop: "StopSignal"
) -> Evaluation:
    """Evaluates on episodes that had no part in choosing `best.pt`, and prints them; with videos where asked for."""
    evaluation = evaluate_now(agent, args, args.seed + 20_000, device, stop)
    if args.capture_video:
        record_videos(agent, args, min(args.eval_episodes, 3), args.seed + 20_000, folder / "videos", device, stop)
    report_evaluation(evaluation)
    return evaluation


def begin(
    args: Args, envs: VectorEnv, modules: dict[str, Any], device: torch.device, stop: "StopSignal", cleanup: ExitStack
) -> tuple["Run | None", dict[str, Any], np.ndarray | None]:
    """Opens a run's folder and resets the environments; with args.resume it first loads that run's checkpoint.

    Returns:
        The run, its counters and the first observations (N, O). Of a finished run only the counters.

    Raises:
        UsageError: the checkpoint does not fit, or the storage does not fit into the memory.
    """
    check_drawing(args)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs a package that is missing: pip install matplotlib")
    # float32, actions int64; a row is two observations, and 5 numbers of the transition.
    storage_bytes = args.batch_size * (4 * (2 * envs.single_observation_space.shape[0] + 5) + 8)
    check_memory(storage_bytes, device)
    counters = {"iteration": 0, "global_step": 0, "updates": 0, "episodes": 0, "best_eval": None, "evaluated": 0}
    if args.resume:
        checkpoint = load_checkpoint(args.resume)
        if checkpoint["args"]["num_envs"] * checkpoint["args"]["num_steps"] != args.batch_size:
            raise UsageError("--num-envs times --num-steps, the batch size, must stay what it was in a resumed run")
        restore(checkpoint, args.resume, counters, **modules)
    trained = counters["iteration"] >= args.num_iterations
    evaluated = not args.eval_every or counters["evaluated"] == counters["global_step"]
    if trained and evaluated:
        print(f"this run is finished, at step {counters['global_step']:,}; a larger --total-timesteps goes on")
        return None, counters, None
    run = cleanup.enter_context(Run(args, stop, counters, modules))
    run.announce(device, describe_envs(args), storage_bytes, args.num_iterations * args.batch_size)
    if trained or crossed(args.eval_every, counters["evaluated"], counters["global_step"]):
        # The run was interrupted in this evaluation.
        run.keep_best(evaluate_now(modules["agent"], args, args.seed + 10_000, device, stop))
    env_seed = reset_seed(args.seed, counters["global_step"])
    envs.action_space.seed(env_seed)
    obs, _ = envs.reset(seed=env_seed)
    check_finite("at a reset", observation=obs)
    return run, counters, obs


def end_iteration(
    run: "Run", scalars: dict[str, float], episodes: list[tuple[int, float, int]], start_step: int, device: torch.device
) -> None:
    """Logs an iteration that began at start_step; evaluates and writes checkpoints where it is time for them.

    Raises:
        FloatingPointError: a loss or a weight is not finite.
    """
    args, global_step = run.args, run.counters["global_step"]
    losses = [value for name, value in scalars.items() if name in {f"losses/{loss}" for loss in LOSS_NAMES}]
    if not all(map(math.isfinite, losses)):
        raise FloatingPointError(f"a loss is not finite at step {global_step:,}; the run cannot go on")
    # The last step may have spoilt the weights, which no loss has seen yet.
    check_weights(run.modules["agent"], global_step)
    run.log(scalars, episodes)
    last = run.counters["iteration"] == args.num_iterations
    if args.eval_every and (last or crossed(args.eval_every, start_step, global_step)):
        run.keep_best(evaluate_now(run.modules["agent"], args, args.seed + 10_000, device, run.stop))
    if last or crossed(args.checkpoint_every, start_step, global_step):
        run.save("latest.pt")


def finish(
    args: Args,
    run: "Run | None",
    counters: dict[str, Any],
    modules: dict[str, Any],
    device: torch.device,
    stop: "StopSignal",
) -> list[float]:
    """Evaluates for the last time, draws the returns where asked for, and returns the scores."""
    folder = run.folder if run else run_folder_of(args.resume)
    evaluation = final_evaluation(modules["agent"], args, folder, device, stop)
    if run and not args.eval_every:
        run.keep_best(evaluation)
    elif not (folder / "best.pt").exists():
        # The run was interrupted in its only evaluation.
        save_checkpoint(folder / "best.pt", args, counters, modules)
    if args.plot:
        plot_returns(folder)
    return evaluation.scores


def moving_average(x: np.ndarray, window: int) -> np.ndarray:
    """Returns the mean of each number (n,) and the `window - 1` before it, or of as many as there are."""
    ends = np.arange(1, len(x) + 1)
    starts = np.maximum(ends - window, 0)
    sums = np.cumsum([0.0, *x])
    return (sums[ends] - sums[starts]) / (ends - starts)


def plot_returns(folder: Path, window: int = 50) -> None:
    """Draws the returns of a run's episodes, and the mean of the last `window` of them, to its `returns.png`."""
    from matplotlib.figure import Figure
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    if "charts/episodic_return" not in events.Tags()["scalars"]:
        print("plot: no episode has ended, there is nothing to draw")
        return
    steps, returns = zip(
        *((event.step, event.value) for event in events.Scalars("charts/episodic_return")), strict=True
    )
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, returns, ".", color="0.7", markersize=3, label="episode")
    axes.plot(steps, moving_average(np.array(returns), window), color="black", label=f"mean of the last {window}")
    axes.set(title=folder.name, xlabel="environment steps", ylabel="return")
    axes.legend()
    figure.savefig(folder / "returns.png", dpi=150)
    print(f"plot: {folder / 'returns.png'}")


class UsageError(Exception):
    """What the user asked for cannot be done: one line on standard error, exit status 2."""


class Interrupted(SystemExit):
    """Ctrl-C or SIGTERM; the exit status is 128 + the signal's number."""


class StopSignal:
    """Turns the first Ctrl-C or SIGTERM into an `Interrupted` at the next `check`; a second one ends at once."""

    def __enter__(self) -> "StopSignal":
        self.signum: int | None = None
        self.previous = {}
        if threading.current_thread() is threading.main_thread():
            self.previous = {signum: signal.signal(signum, self.handle) for signum in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Notes the first signal; a handler may interrupt anything, so the work is done at the next `check`."""
        if self.signum is not None:
            os._exit(128 + self.signum)
        self.signum = signum
        os.write(2, b"\nstopping; a second signal ends at once\n")

    def check(self) -> None:
        """Raises Interrupted if a signal came."""
        if self.signum is not None:
            raise Interrupted(128 + self.signum)


class Run:
    """A run's folder, its log and its checkpoints; leaving it by an interruption writes `latest.pt`.

    Args:
        args: of the script; `args.resume` goes on in that run's folder.
        stop: of this process.
        counters: with at least global_step and best_eval; the training loop updates them.
        modules: what has a state_dict and goes into a checkpoint, by name.

    Raises:
        UsageError: the folder cannot be made, or a package that the arguments ask for is missing.
    """

    def __init__(self, args: Args, stop: StopSignal, counters: dict[str, Any], modules: dict[str, Any]) -> None:
        self.args, self.stop, self.counters, self.modules = args, stop, counters, modules
        self.folder = run_folder_of(args.resume) if args.resume else make_run_folder(args)
        for stray in self.folder.glob("*.tmp*"):
            stray.unlink()
        write_args_json(self.folder, args, counters["global_step"])
        if args.track:
            import wandb

            wandb.init(
                project=args.wandb_project_name,
                entity=args.wandb_entity,
                name=self.folder.name,
                config=dataclasses.asdict(args),
                sync_tensorboard=True,
            )
        # Purging removes the named step itself, which the resumed run does not draw again.
        purge_step = counters["global_step"] + 1 if args.resume else None
        self.writer = SummaryWriter(str(self.folder), purge_step=purge_step)
        rows = "\n".join(f"|{name}|{value}|" for name, value in dataclasses.asdict(args).items())
        self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}", counters["global_step"])
        self.recent_scores: deque[float] = deque(maxlen=100)
        self.bar: tqdm | None = None
        self.start = self.last_line = time.perf_counter()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.bar:
            self.bar.close()
        # A signal to all processes of the run ends environment processes too, which reads as a broken pipe.
        ends_by_signal = (Interrupted, EOFError, BrokenPipeError, ConnectionResetError)
        interrupted = self.stop.signum is not None and kind in ends_by_signal
        if interrupted:
            self.save("latest.pt")
            print(f"interrupted at step {self.counters['global_step']:,}; go on with: {self.command('--resume')}")
        with nullcontext() if kind is None else suppress(Exception):
            self.writer.close()
        if self.args.track:
            import wandb

            wandb.finish(exit_code=0 if kind is None else 1)
        if kind is None:
            print(f"run folder: {self.folder}\nlook at it: tensorboard --logdir {self.folder.parent}")
        if interrupted:
            raise Interrupted(128 + self.stop.signum) from None

    def command(self, flag: str) -> str:
        """Returns the command that resumes or evaluates this run."""
        return f"python {Path(__file__).name} {flag} {shlex.quote(str(self.folder))}"

    def announce(
        self, device: torch.device, environment: str, storage_bytes: int, total: int, unit: str = "steps"
    ) -> None:
        """Says what runs where, and starts the progress bar, which counts steps or the counter of the unit's name."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
        print(f"run folder: {self.folder}\ndevice: {device} ({name})\nenvironment: {environment}")
        print(f"storage: {storage_bytes / 2**20:,.1f} MiB", flush=True)
        self.total, self.unit, self.counter = total, unit, "global_step" if unit == "steps" else unit
        self.start_count = self.counters[self.counter]
        if self.args.progress and sys.stderr.isatty():
            self.bar = tqdm(total=total, initial=self.start_count, unit=f" {unit}", dynamic_ncols=True)

    def log(self, scalars: dict[str, float], episodes: list[tuple[int, float, int]]) -> None:
        """Writes scalars at the global step, and finished episodes (step, score, length) each at its own."""
        for step, score, length in episodes:
            self.writer.add_scalar("charts/episodic_return", score, step)
            self.writer.add_scalar("charts/episodic_length", length, step)
            self.recent_scores.append(score)
        global_step = self.counters["global_step"]
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, global_step)
        self.writer.flush()
        score_text = f"{np.mean(self.recent_scores):.1f}" if self.recent_scores else "none yet"
        now, done = time.perf_counter(), self.counters[self.counter]
        if self.bar:
            self.bar.set_postfix_str(f"return {score_text}", refresh=False)
            self.bar.update(done - self.bar.n)
        elif now - self.last_line > 10 and done > self.start_count:
            self.last_line = now
            rate = (done - self.start_count) / (now - self.start)
            left = timedelta(seconds=int((self.total - done) / rate))
            progress = f"{self.unit[:-1]} {done:,} of {self.total:,}, {rate:,.0f} {self.unit}/s"
            print(f"{progress}, return {score_text}, {left} left", flush=True)

    def keep_best(self, evaluation: Evaluation) -> None:
        """Logs an evaluation, and writes `best.pt` if none was better; a tie keeps the newer."""
        means = {"return_mean": np.mean(evaluation.scores), "return_std": np.std(evaluation.scores)}
        means |= {"length_mean": np.mean(evaluation.lengths)}
        means |= {f"{name}_mean": mean for name, mean in evaluation.mean_measures().items()}
        for name, value in means.items():
            self.writer.add_scalar(f"eval/{name}", value, self.counters["global_step"])
        self.counters["evaluated"] = self.counters["global_step"]
        if self.counters["best_eval"] is None or quality(evaluation) >= self.counters["best_eval"]:
            self.counters["best_eval"] = quality(evaluation)
            self.save("best.pt")
        self.save("latest.pt")

    def save(self, name: str) -> None:
        """Writes a checkpoint; one that is cut off at any moment leaves the old file whole."""
        self.writer.flush()
        save_checkpoint(self.folder / name, self.args, self.counters, self.modules)


def save_checkpoint(path: Path, args: Args, counters: dict[str, Any], modules: dict[str, Any]) -> None:
    """Writes all that training needs to go on; at any moment the file at `path` is whole, the old or the new one."""
    content = {
        "script": Path(__file__).stem,
        "format_version": FORMAT_VERSION,
        "args": dataclasses.asdict(args),
        "counters": dict(counters),
        "random_states": random_states(),
        **{name: module.state_dict() for name, module in modules.items()},
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def find_checkpoint(path: str) -> Path:
    """Returns the checkpoint file that a path names: itself, or `latest.pt` of a run folder."""
    found = Path(path) / "latest.pt" if Path(path).is_dir() else Path(path)
    if not found.is_file():
        raise UsageError(f"{path}: there is no checkpoint file here, {found.name!r} is missing")
    return found


def run_folder_of(path: str) -> Path:
    """Returns the folder of the run that a path to it, or to one of its checkpoints, names."""
    return find_checkpoint(path).parent


def load_checkpoint(path: str) -> dict[str, Any]:
    """Returns a checkpoint's content, tensors on the CPU; code in the file is refused, never run.

    Raises:
        UsageError: the file is missing, unreadable, of another script or of another format version.
    """
    found = find_checkpoint(path)
    try:
        with warnings.catch_warnings():
            # What torch would warn of in a foreign file ends in an error here.
            warnings.simplefilter("ignore")
            content = torch.load(found, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{found}: not a checkpoint, or it holds more than tensors and plain values: refused"
        ) from error
    except Exception as error:  # a damaged file may raise anything
        raise UsageError(f"{found}: no checkpoint, or a damaged one ({type(error).__name__})") from error
    if not isinstance(content, dict) or "script" not in content or "format_version" not in content:
        raise UsageError(f"{found}: this is no checkpoint of these scripts")
    if content["script"] != Path(__file__).stem:
        raise UsageError(f"{found}: this checkpoint is of {content['script']}.py, not of {Path(__file__).name}")
    if content["format_version"] != FORMAT_VERSION:
        raise UsageError(f"{found}: format version {content['format_version']}, this script reads {FORMAT_VERSION}")
    for part in ("args", "counters", "agent"):
        if part not in content:
            raise UsageError(f"{found}: this checkpoint is damaged, it has no {part}")
    return content


def load_weights(module: nn.Module, weights: dict[str, Tensor], path: str) -> None:
    """Copies a checkpoint's weights into the module.

    Raises:
        UsageError: names or shapes differ; the message names the first tensor that does.
    """
    own = module.state_dict()
    for name in [*own, *weights]:
        want, got = (tuple(x[name].shape) if name in x else None for x in (own, weights))
        if want != got:
            raise UsageError(f"{path}: the tensor {name} has the shape {got}, these arguments want {want}")
    module.load_state_dict(weights)


def restore(checkpoint: dict[str, Any], path: str, counters: dict[str, Any], **modules: Any) -> None:  # noqa: ANN401
    """Loads a checkpoint into networks and optimizers, counters and random states.

    Raises:
        UsageError: it does not fit, or is an agent file, which has no optimizer.
    """
    for name, module in modules.items():
        if name not in checkpoint:
            raise UsageError(f"{path}: an agent file has no {name}: it can be evaluated, not resumed")
        if isinstance(module, nn.Module):
            load_weights(module, checkpoint[name], path)
        else:
            module.load_state_dict(checkpoint[name])
    counters.update(checkpoint["counters"])
    set_random_states(checkpoint["random_states"])


def random_states() -> dict[str, Any]:
    """Returns the states of python's, numpy's and torch's global generators as plain values and tensors."""
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 (users' environments may draw from it)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    return {
        "python": random.getstate(),
        "numpy": numpy_state,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Sets the generators to what `random_states` returned."""
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    numpy_state = {**states["numpy"], "state": dict(states["numpy"]["state"])}
    numpy_state["state"]["key"] = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy_state)  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def reset_seed(seed: int, global_step: int) -> int:
    """Returns the seed of the environments, drawn from the run's and the step at which it starts or goes on.

    Environment i gets this seed + i. Were it the run's own, runs of neighbouring seeds would share most starts.
    """
    return int(np.random.SeedSequence([seed, global_step]).generate_state(1)[0] % 2**30)


def crossed(every: int, before: int, after: int) -> bool:
    """Says whether a multiple of `every` lies in (before, after]; never for 0."""
    return every > 0 and after // every > before // every


def check_range(
    args: "Args", names: str, least: float = -math.inf, most: float = math.inf, above: float = -math.inf
) -> None:
    """Raises a ValueError unless each named argument is finite and within its range; None passes."""
    for name in names.split():
        value = getattr(args, name)
        if value is None or (least <= value <= most and above < value < math.inf):
            continue
        limits = {"at least": least, "above": above, "at most": most}
        rule = " and ".join(f"{words} {limit:,}" for words, limit in limits.items() if math.isfinite(limit))
        raise ValueError(f"--{name.replace('_', '-')} {value} must be a finite number {rule}")


@contextmanager
def closing_envs(envs: VectorEnv) -> Iterator[VectorEnv]:
    """Closes the environments at the end, whatever state an error left them in."""
    try:
        yield envs
    finally:
        try:
            with warnings.catch_warnings():
                # gymnasium warns where a step is under way, as it is when a process died or a signal came.
                warnings.simplefilter("ignore")
                envs.close(**({"terminate": True} if isinstance(envs, AsyncVectorEnv) else {}))
        except (EOFError, OSError):
            # Closing first waits for a step under way, in vain where an environment process died.
            for process in envs.processes:
                process.terminate()
            envs.closed = True


def check_memory(storage_bytes: int, device: torch.device) -> None:
    """Raises a UsageError if the storage does not fit into the free memory of the device."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if storage_bytes > free:
        need, have = f"{storage_bytes / 2**30:,.2f} GiB", f"{free / 2**30:,.2f} GiB"
        raise UsageError(f"the storage takes {need}, more than the {have} that are free on {device}")


def prepare(args: Args) -> torch.device:
    """Seeds all generators, sets threads and determinism, checks paths and packages, and returns the device."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(args.threads or min(cores, 8))
    random.seed(args.seed)
    np.random.seed(args.seed)  # noqa: NPY002
    torch.manual_seed(args.seed)
    if sys.platform == "linux":
        # Each minibatch frees and asks again for the same large tensors. Kept by the process, they cost no page faults,
        # which took a tenth of an update. (M_MMAP_THRESHOLD is -3, M_TRIM_THRESHOLD -1; other libcs ignore this.)
        with suppress(AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(-3, 2**30)
            libc.mallopt(-1, 2**31 - 1)
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Zeroing each new tensor as well would cost time and hide nothing: no script reads unset memory.
        torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.backends.cudnn.benchmark = not args.torch_deterministic
    folder = Path(args.run_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UsageError(f"--run-dir {args.run_dir}: {existing} is no folder that can be written to")
    for flag, module, package in (("track", "wandb", "wandb"), ("capture_video", "imageio_ffmpeg", "imageio[ffmpeg]")):
        if getattr(args, flag) and importlib.util.find_spec(module) is None:
            raise UsageError(f"--{flag.replace('_', '-')} needs a package that is missing: pip install {package}")
    return torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")


def make_run_folder(args: Args) -> Path:
    """Makes a folder that no other run has, for two that start in the same second too."""
    env_id = args.env_id.replace("/", "-").replace(":", "-")
    name = f"{env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        folder = Path(args.run_dir) / (name + suffix)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not folder.is_dir():
                raise UsageError(f"--run-dir {args.run_dir}: a file is in the way") from None
        except OSError as error:
            raise UsageError(f"--run-dir {args.run_dir}: cannot make a folder there ({error.strerror})") from error
        else:
            return folder
    raise UsageError(f"--run-dir {args.run_dir}: 1000 runs called {name}")


def write_args_json(folder: Path, args: Args, global_step: int) -> None:
    """Writes arguments, versions, device and command line; `starts` keeps those of a resumed run's earlier starts."""
    path = folder / "args.json"
    earlier = []
    # A full disk or a kill may have left half a file.
    with suppress(OSError, ValueError, KeyError):
        earlier = json.loads(path.read_text())["starts"]
    commit = None
    with suppress(OSError, subprocess.SubprocessError):
        git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    env_package = str(find_spec(args.env_id).entry_point).replace(":", ".").split(".")[0].replace("_", "-")
    versions = {"python": platform.python_version()}
    for package in ("torch", "gymnasium", "numpy", env_package):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    use_cuda = args.cuda and torch.cuda.is_available()
    start = {
        "global_step": global_step,
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "versions": versions,
        "git_commit": commit,
        "device": torch.cuda.get_device_name() if use_cuda else f"cpu {platform.machine()}",
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    content = {"args": dataclasses.asdict(args), **start, "starts": [*earlier, start]}
    path.write_text(json.dumps(content, indent=2) + "\n")


def report_evaluation(evaluation: Evaluation) -> None:
    """Prints each episode and, last, the line that sums them up."""
    scores, lengths = evaluation.scores, evaluation.lengths
    for i, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        print(f"episode {i}: return={score:g} length={length}")
    pairs = {"mean": np.mean(scores), "std": np.std(scores), "min": min(scores), "max": max(scores)}
    pairs |= {"episodes": len(scores), "mean_length": np.mean(lengths), **evaluation.mean_measures()}
    print("eval:", *(f"{name}={round(float(value), 4):g}" for name, value in pairs.items()), flush=True)


def evaluate_checkpoint(args: Args) -> None:
    """Evaluates the checkpoint or agent file at args.evaluate, which is not changed, and prints the result."""
    checkpoint = load_checkpoint(args.evaluate)
    device = prepare(args)
    check_drawing(args)
    with StopSignal() as stop, closing_envs(make_envs(args, 1, training=False)) as envs:
        agent = make_agent(args, envs, device)
        load_weights(agent, checkpoint["agent"], args.evaluate)
        print(f"device: {device}\nenvironment: {describe_envs(args)}", flush=True)
        final_evaluation(agent, args, run_folder_of(args.evaluate), device, stop)


def parse_args(argv: list[str]) -> Args:
    """Returns the arguments; with --resume or --evaluate those of that run, except what the command line overrides.

    Raises:
        UsageError: the checkpoint cannot be read. Wrong flags and values end the process in tyro, with status 2.
    """
    paths = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    paths.add_argument("--resume")
    paths.add_argument("--evaluate")
    found, _ = paths.parse_known_args(argv)
    if found.resume and found.evaluate:
        raise UsageError("--resume and --evaluate exclude each other")
    default = Args()
    if found.resume or found.evaluate:
        stored = load_checkpoint(found.resume or found.evaluate)["args"]
        default = Args(**{name: value for name, value in stored.items() if name not in NOT_STORED})
    return tyro.cli(Args, default=default, args=argv)


def report_thread_error(error: threading.ExceptHookArgs) -> None:
    """Leaves a full disk to the main thread, where TensorBoard raises again what its writing thread met."""
    if not issubclass(error.exc_type, OSError):
        threading.__excepthook__(error)


def main() -> None:
    """Runs the command line: status 0 when done, 1 when the run failed, 2 when the arguments are wrong."""
    sys.path.append(os.getcwd())
    threading.excepthook = report_thread_error
    try:
        args = parse_args(sys.argv[1:])
        if args.evaluate:
            evaluate_checkpoint(args)
        else:
            train(args)
    except (UsageError, gym.error.Error, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (FloatingPointError, MemoryError, torch.OutOfMemoryError, OSError, EOFError) as error:
        broken_pipe = isinstance(error, EOFError | ConnectionError)
        reason = "an environment process died, or what reads this output did" if broken_pipe else error
        print(f"error: {reason}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
