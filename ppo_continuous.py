# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.13.0", "gymnasium>=1.4.0", "tyro>=1.0.16", "tensorboard>=2.21.0", "numpy>=2.1.0", "imageio>=2.34.0",
#     "imageio-ffmpeg>=0.6.0", "psutil>=5.9.8", "tqdm>=4.66.3", "matplotlib>=3.10.8", "pygame-ce>=2.5.2",
#     'box2d>=2.3.10; python_version < "3.14" and (sys_platform != "linux" or platform_machine == "x86_64")',
# ]
# ///
"""Proximal Policy Optimization (PPO) with continuous actions.

Paper: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the details that Huang et al. 2022 list for
       continuous actions (https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/).
Run:   python ppo_continuous.py --env-id Pendulum-v1
Shapes: T steps, N envs, B = T * N, M minibatch, O observation dims, A action dims.
        Index t is the transition from obs[t]: dones[t] says that step t ended its episode (CleanRL's dones[t + 1]).
Differs from PPO's paper: the value loss is clipped, advantages are normalised in each minibatch, gradients clipped by
        their norm, observations and rewards scaled by running statistics, and the rate falls to 0, as in OpenAI's code;
        a time limit is no end of the task, so the last value of a truncated episode is bootstrapped.
"""

import difflib
import importlib.util
import json
import logging
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
from torch.distributions import Distribution, Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


# ----- Arguments -----
@dataclass(frozen=True)
class Args:
    """PPO on environments with vector observations and continuous actions."""

    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seeds python, numpy, torch, the environments and their action spaces
    torch_deterministic: bool = True  # deterministic kernels: on a CPU the same command gives the same weights
    cuda: bool = True  # use a CUDA device where there is one, else the CPU
    threads: int = 1  # CPU threads; 0: one for each core, for torch at most 8
    run_dir: str = "runs"  # parent folder of the run folders
    checkpoint_every: int = 100_000  # environment steps between checkpoints; 0: only at evaluations and on interruption
    eval_every: int = 50_000  # environment steps between evaluations during training; 0: only at the end
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

    env_id: str = "Pendulum-v1"  # any id that gymnasium.make takes, package.module:Id-v0 included
    env_kwargs: str = "{}"  # keyword arguments for gymnasium.make, a JSON object
    vector: Literal["sync", "async"] = "sync"  # gymnasium's environments step in this process, or in one each
    num_envs: int = 16  # parallel environments, N
    rescale_actions: bool = True  # scale finite bounds of actions to -1 and 1, so that any task starts alike
    norm_obs: bool = True  # scale observations to mean 0, standard deviation 1 by running statistics
    norm_reward: bool = True  # divide rewards by the running deviation of the discounted return
    num_steps: int = 128  # steps of each environment in one rollout, T

    total_timesteps: int = 200_000  # environment steps of the whole run, over all environments
    learning_rate: float = 5e-4  # step size of the optimizer
    anneal_lr: bool = True  # let the learning rate fall linearly to 0 over the run
    gamma: float = 0.95  # discount of a reward one step later
    compile: bool = False  # compile the network, or an update's loss; needs a C++ compiler on a CPU, seconds to start
    hidden_sizes: tuple[int, ...] = (64, 64)  # units of each hidden layer
    state_dependent_std: bool = False  # let the actor give the actions' deviation at each observation; off: one for all
    log_std_init: float = 0.0  # log of the policy's deviation at the start, or the bias of the outputs that give it

    num_minibatches: int = 32  # minibatches of one pass over the batch; B / num_minibatches samples each
    update_epochs: int = 10  # passes over each batch
    gae_lambda: float = 0.95  # lambda of GAE: 0 is one-step TD (low variance), 1 sums the whole rollout (low bias)
    norm_adv: bool = True  # normalise the advantages of each minibatch to mean 0, standard deviation 1
    clip_coef: float = 0.2  # epsilon of PPO's equation 7; usually 0.1 to 0.3
    clip_vloss: bool = True  # a value gains nothing by moving more than clip_coef from its old estimate, as the ratio
    ent_coef: float = 0.0  # weight of the entropy bonus; usually 0 to 0.05
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # largest norm of the gradient of all weights; longer ones are scaled down to it
    target_kl: float | None = None  # end an update at the first minibatch of a larger KL divergence; try 0.01 to 0.05

    @property
    def batch_size(self) -> int:
        """Samples of one rollout, B."""
        return self.num_envs * self.num_steps

    def check(self) -> None:
        """Raises a UsageError where a value is out of range or does not fit another one."""
        limits = {
            "num_steps num_minibatches update_epochs eval_episodes": (1, math.inf),
            "num_envs hidden_sizes": (1, 10_000),
            "threads": (0, 1_024),
            "checkpoint_every eval_every ent_coef vf_coef": (0, math.inf),
            "learning_rate": (1e-12, 1),
            "clip_coef max_grad_norm target_kl": (1e-12, math.inf),
            "gamma gae_lambda": (0, 1),
            "log_std_init": (-5, 2),  # the limits of all deviations, below
            "seed": (0, 2_000_000_000),  # evaluations add to it, and some environments take 31 bits
            "total_timesteps": (self.batch_size, math.inf),
        }
        check_limits(self, limits)
        fits = self.batch_size % self.num_minibatches == 0 and self.num_minibatches < self.batch_size
        require(fits, f"--num-minibatches {self.num_minibatches} must divide {self.batch_size} = N * T into parts > 1")


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


def make_env(args: Args, render_mode: str | None = None, training_pid: int | None = None) -> gym.Env:
    """Returns an environment that shows vectors (O,), which the agent scales, and takes a Box (A,)."""
    if training_pid not in (None, os.getpid()):
        # Ctrl-C reaches an environment's own process too, and is the training process's to handle.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    spec = find_spec(args.env_id)
    # Not every environment takes the keyword, so it is left out where nothing is drawn.
    keywords = json.loads(args.env_kwargs) | ({"render_mode": render_mode} if render_mode else {})
    # Without a time limit of its own an evaluation might never end.
    env = gym.make(spec, **{"max_episode_steps": spec.max_episode_steps or EVAL_MAX_STEPS, **keywords})
    obs_space, box = env.observation_space, env.action_space
    vectors = isinstance(obs_space, gym.spaces.Box) and len(obs_space.shape) == 1
    fits = vectors and isinstance(box, gym.spaces.Box) and box.dtype.kind == "f"
    found = " and ".join(f"{type(x).__name__} {x.shape} {x.dtype}" for x in (obs_space, box))
    others = "ppo_cartpole.py takes vectors and Discrete actions, ppo_continuous.py vectors and Box, *_atari.py"
    require(fits, f"it has {found}; {others} uint8 images from 36 x 36 on and Discrete; envs/README.md tells more")
    env = RecordEpisodeStatistics(env, stats_key="whole_episode")
    # The agent gives any vector. Where the bounds allow one action only, any number becomes that; float32's largest
    # number, too, stands for no bound.
    bounded = ((box.low < box.high) & (box.high / 2 - box.low / 2 < np.float32(1e30))).flatten()
    low, high = np.where(bounded, box.low.flatten(), -np.inf), np.where(bounded, box.high.flatten(), np.inf)
    shaped = lambda action: action.reshape(box.shape).clip(box.low, box.high).astype(box.dtype)  # noqa: E731
    env = gym.wrappers.TransformAction(env, shaped, gym.spaces.Box(low, high, dtype=box.dtype))
    if args.rescale_actions:
        # Around [10, 12] or +-1000 every first sample would be cut to one bound, or be tiny.
        env = gym.wrappers.RescaleAction(env, np.where(bounded, -1, low), np.where(bounded, 1, high))
    return WholeEpisodes(env)


def make_envs(args: Args, num_envs: int, render_mode: str | None = None) -> VectorEnv:
    """Returns parallel environments, for training and evaluation alike."""
    make = AsyncVectorEnv if args.vector == "async" else SyncVectorEnv
    envs = make([partial(make_env, args, render_mode, os.getpid())] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    if args.vector == "async":  # gymnasium would wait for ever where one of its processes died
        envs.close_extras = lambda **_: [process.terminate() for process in envs.processes]
    return envs


# ----- Networks -----
def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    """Returns the layer with orthogonal weights of gain `std` and zero biases."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class RunningMeanStd(nn.Module):
    """Mean and variance of all samples so far, in float64; as buffers, so that a checkpoint carries them."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, samples: Tensor) -> None:
        """Adds samples (n, *shape), exactly as if all had come at once (Chan et al. 1979, equation 2.1)."""
        var, mean = torch.var_mean(samples.double(), dim=0, correction=0)
        count, total = len(samples), self.count + len(samples)
        delta = mean - self.mean
        squares = self.var * self.count + var * count + delta.square() * self.count * count / total
        self.mean, self.var, self.count = self.mean + delta * count / total, squares / total, total


class RewardScaler(RunningMeanStd):
    """Divides rewards by the running deviation of the discounted return, as OpenAI's baselines do.

    An environment's return is gamma times the one before plus the reward, and 0 after the last step of an episode.
    """

    def __init__(self, num_envs: int, gamma: float) -> None:
        super().__init__(())
        self.gamma, self.last_return = gamma, torch.zeros(num_envs)  # no buffer: a resumed run starts new episodes

    def forward(self, rewards: Tensor, dones: Tensor) -> Tensor:
        """Returns the rewards (T, N) scaled and kept within +-10; first their returns are counted."""
        returns = []
        for reward, goes_on in zip(rewards, 1 - dones, strict=True):
            returns.append(self.gamma * self.last_return + reward)
            self.last_return = returns[-1] * goes_on
        self.update(torch.cat(returns))
        return (rewards / (self.var + 1e-8).sqrt()).clamp(-10, 10)


class Agent(nn.Module):
    """Actor and critic in separate networks of tanh layers, with the statistics of the observations."""

    def __init__(self, args: Args, envs: VectorEnv) -> None:
        super().__init__()
        self.norm_obs, self.state_dependent_std = args.norm_obs, args.state_dependent_std
        size, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
        self.obs_statistics = RunningMeanStd((size,))
        self.actor, self.critic = nn.Sequential(), nn.Sequential()
        for hidden_size in args.hidden_sizes:
            for network in (self.actor, self.critic):
                network.extend([layer_init(nn.Linear(size, hidden_size)), nn.Tanh()])
            size = hidden_size
        # A small gain starts the means near 0, whatever the observation.
        self.actor.append(layer_init(nn.Linear(size, action_dim * (1 + args.state_dependent_std)), std=0.01))
        self.critic.append(layer_init(nn.Linear(size, 1), std=1))
        if args.state_dependent_std:
            nn.init.constant_(self.actor[-1].bias[action_dim:], args.log_std_init)
        else:
            self.log_std = nn.Parameter(torch.full((action_dim,), args.log_std_init))

    def normalise(self, obs: Tensor) -> Tensor:
        """Returns observations (M, O) with mean 0 and standard deviation 1, kept within +-10."""
        if not self.norm_obs:
            return obs.float()
        # In float64, since float32 would round away what is small beside a large offset, such as a clock's.
        scaled = (obs.double() - self.obs_statistics.mean) * (self.obs_statistics.var + 1e-8).rsqrt()
        return scaled.clamp(-10, 10).float()

    def policy(self, scaled_obs: Tensor) -> Distribution:
        """Returns the distribution of actions (M, A) for scaled observations (M, O)."""
        output = self.actor(scaled_obs)
        mean, log_std = output.chunk(2, dim=-1) if self.state_dependent_std else (output, self.log_std)
        # The limits keep the exponential harmless; beyond them there is no gradient.
        return Normal(mean, log_std.clamp(-5, 2).exp(), validate_args=False)

    def value(self, scaled_obs: Tensor) -> Tensor:
        """Returns the values (M,) of scaled observations (M, O)."""
        return self.critic(scaled_obs).squeeze(-1)

    def act(self, obs: Tensor, greedy: bool) -> Tensor:
        """Returns the actions (M, A), which environments clip to their bounds: the policy's means, or sampled."""
        policy = self.policy(self.normalise(obs))
        return policy.mean if greedy else policy.sample()


# ----- Math -----
def compute_gae(
    rewards: Tensor, values: Tensor, next_value: Tensor, dones: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Returns the advantages (T, N) of generalised advantage estimation (Schulman et al. 2016, equation 16).

    Where a time limit cut an episode off, rewards (T, N) hold gamma * V(final obs) too; values (T, N) are V(obs[t]),
    next_value (N,) is V after the last step; dones (T, N) are 1 where a step ended its episode: no later delta counts.
    """
    next_values = torch.cat([values[1:], next_value.unsqueeze(0)])
    deltas = rewards + gamma * next_values * (1 - dones) - values
    advantages, tail = torch.zeros_like(rewards), torch.zeros_like(next_value)
    for t in reversed(range(len(rewards))):
        advantages[t] = tail = deltas[t] + gamma * gae_lambda * (1 - dones[t]) * tail
    return advantages


def policy_loss(ratio: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    """Returns the negated clipped objective, PPO's equation 7, as a mean over (M,) samples."""
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages).mean()


def value_loss(new_values: Tensor, values: Tensor, returns: Tensor, clip_coef: float | None) -> Tensor:
    """Returns half the mean over (M,) of the larger squared error: of the value, or of it clipped near the old one."""
    squared_error = (new_values - returns).square()
    if clip_coef is not None:
        clipped = values + (new_values - values).clamp(-clip_coef, clip_coef)
        squared_error = torch.max(squared_error, (clipped - returns).square())
    return 0.5 * squared_error.mean()


def minibatch_loss(agent: Agent, args: Args, minibatch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Returns the loss of a minibatch, and what is logged of it (6,): both losses, entropy, two KLs, clip fraction.

    A minibatch is scaled observations (M, O), actions (M, A), and (M,) log-probabilities, values, advantages, returns.
    """
    scaled_obs, actions, logprobs, values, advantages, returns = minibatch
    policy, new_values = agent.policy(scaled_obs), agent.value(scaled_obs)
    logratio = policy.log_prob(actions).sum(-1) - logprobs
    ratio = logratio.exp()
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    pg_loss = policy_loss(ratio, advantages, args.clip_coef)
    v_loss = value_loss(new_values, values, returns, args.clip_coef if args.clip_vloss else None)
    entropy = policy.entropy().sum(-1).mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    # Two estimates of KL(old || new), the second of lower variance: http://joschu.net/blog/kl-approx.html
    old_approx_kl, approx_kl = (-logratio).mean(), (ratio - 1 - logratio).mean()
    clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean()
    return loss, torch.stack([v_loss, pg_loss, entropy, old_approx_kl, approx_kl, clipfrac]).detach()


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
    old = vars(args) | (load_checkpoint(args.resume)["args"] if args.resume is not None else {})
    require((n := old["num_envs"] * old["num_steps"]) == args.batch_size, f"--num-envs times --num-steps must stay {n}")
    device = prepare(args)
    with ExitStack() as cleanup:
        envs = cleanup.enter_context(closing(make_envs(args, args.num_envs)))
        agent = Agent(args, envs).to(device)
        reward_scaler = RewardScaler(args.num_envs, args.gamma)
        # A rate in a tensor does not have to be compiled anew where it changes.
        parameters, rate = list(agent.parameters()), torch.tensor(args.learning_rate)
        optimizer = torch.optim.Adam(parameters, lr=rate, eps=1e-5, foreach=False, fused=not args.compile)
        size, obs_dim = (args.num_steps, args.num_envs), envs.single_observation_space.shape[0]
        action_dim = envs.single_action_space.shape[0]
        check_memory(args.batch_size * (16 * obs_dim + 4 * action_dim + 24), torch.device("cpu"), "num-steps")
        num_iterations = args.total_timesteps // args.batch_size  # whole ones; the steps that remain are left out
        modules = {"agent": agent, "reward_scaler": reward_scaler, "optimizer": optimizer}
        run = cleanup.push(Run(args, "global_step", num_iterations * args.batch_size, **modules))
        optimizer.param_groups[0]["fused"] = not args.compile  # --resume brings the checkpoint's

        loss_of, clip_norm, step = minibatch_loss, nn.utils.clip_grad_norm_, optimizer.step
        if args.compile:
            torch._logging.set_logs(dynamo=logging.ERROR)  # it warns of what it leaves out of the optimizer
            loss_of, clip_norm, step = (torch.compile(x) for x in (loss_of, clip_norm, step))

        # Storage of one rollout, on the CPU, where the environments are; observations may be float64.
        obs, final_obs = torch.zeros((2, *size, obs_dim), dtype=torch.float64)
        actions, logprobs = torch.zeros((*size, action_dim)), torch.zeros(size)
        rewards, dones, cut_off = torch.zeros((3, *size))

        next_obs, _ = envs.reset(seed=run.env_seed)
        for iteration in range(run.counters["global_step"] // args.batch_size + 1, num_iterations + 1):
            start_time, start_step = time.perf_counter(), (iteration - 1) * args.batch_size
            remaining = 1 - (iteration - 1) / num_iterations
            optimizer.param_groups[0]["lr"].fill_(args.learning_rate * (remaining if args.anneal_lr else 1))

            # Collect T steps from each of the N environments.
            for t in range(args.num_steps):
                stop_if_asked()
                obs[t] = torch.from_numpy(next_obs)
                with torch.no_grad():
                    policy = agent.policy(agent.normalise(obs[t].to(device)))
                    sample = policy.sample()
                    actions[t], logprobs[t] = sample, policy.log_prob(sample).sum(-1)
                next_obs, reward, termination, truncation, infos = envs.step(actions[t].numpy())
                rewards[t], dones[t] = torch.from_numpy(reward), torch.from_numpy(termination | truncation)
                cut_off[t] = torch.from_numpy(truncation & ~termination)
                final_obs[t] = torch.from_numpy(next_obs)
                for i in np.flatnonzero(truncation):  # there next_obs is the start of the next episode already
                    final_obs[t, i] = torch.from_numpy(np.array(infos["final_obs"][i]))
                for episode in finished_episodes(infos).values():
                    run.log_episode(start_step + (t + 1) * args.num_envs, episode)

            # A time limit is not the end of the task: bootstrap from the observation that it cut off.
            with torch.no_grad():
                scaled_obs, scaled_final_obs = (agent.normalise(x.to(device)) for x in (obs, final_obs))
                values, final_values = agent.value(scaled_obs).cpu(), agent.value(scaled_final_obs).cpu()
            scaled_rewards = reward_scaler(rewards, dones) if args.norm_reward else rewards
            scaled_rewards = scaled_rewards + args.gamma * final_values * cut_off
            advantages = compute_gae(scaled_rewards, values, final_values[-1], dones, args.gamma, args.gae_lambda)
            returns = advantages + values

            # (T, N, ...) -> (B, ...), then several passes in random minibatches.
            batch = [x.flatten(0, 1).to(device) for x in (scaled_obs, actions, logprobs, values, advantages, returns)]
            losses = []
            passes = (torch.randperm(args.batch_size, device=device) for _ in range(args.update_epochs))
            shuffled = ([x[order].chunk(args.num_minibatches) for x in batch] for order in passes)
            for minibatch in (minibatch for chunks in shuffled for minibatch in zip(*chunks, strict=True)):
                loss, terms = loss_of(agent, args, minibatch)
                optimizer.zero_grad()
                loss.backward()
                losses.append(torch.cat([terms, clip_norm(parameters, args.max_grad_norm, foreach=False).view(1)]))
                if args.target_kl is not None and terms[4] > args.target_kl:  # approx_kl
                    break  # out of all passes, and this step is not taken
                step()

            # Only now: with other statistics in the update the ratio of new and old policy would not start at 1.
            agent.obs_statistics.update(obs.flatten(0, 1).to(device))
            means = torch.stack(losses).mean(0).tolist()
            run.counters["global_step"] = global_step = iteration * args.batch_size
            names = ("value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm")
            scalars = {f"losses/{name}": mean for name, mean in zip(names, means, strict=True)}
            scalars["losses/explained_variance"] = (1 - advantages.var() / (returns.var() + 1e-12)).item()
            scalars["charts/learning_rate"] = float(optimizer.param_groups[0]["lr"])
            scalars["charts/SPS"] = args.batch_size / (time.perf_counter() - start_time)
            run.log(scalars)

            last = iteration == num_iterations
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
