"""Makes an agent file of a checkpoint: what `--evaluate` needs, and nothing that only training needs.

Run:   python benchmarks/export_agent.py runs/RUN/best.pt benchmarks/agents/pong.pt
Kept are the script's name, the format version, the arguments, the counters and the agent. Optimizer, target network and
replay memory are left out, so the file cannot be resumed. Weights are stored in half precision, 3 significant
digits, which halves the file again; --no-half keeps them exact. Paths of this machine are not stored.
"""

import io
import os
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

DESCRIPTION = ("script", "format_version", "args", "counters")


class UsageError(Exception):
    """What the user asked for cannot be done: one line on standard error, exit status 2."""


@dataclass(frozen=True)
class Args:
    """Makes an agent file of a checkpoint."""

    checkpoint: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
    """checkpoint file of a run; it is not changed"""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT.pt")]
    """agent file to write"""
    half: bool = True
    """store weights in half precision; biases and statistics keep theirs"""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Returns a checkpoint's content, tensors on the CPU; code in the file is refused, never run.

    Raises:
        UsageError: the file is missing, unreadable or no checkpoint.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or foreign file may raise anything, one that holds code an UnpicklingError
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise UsageError(f"{path}: no checkpoint that can be read ({reason})") from error
    if not isinstance(content, dict) or any(name not in content for name in (*DESCRIPTION, "agent")):
        raise UsageError(f"{path}: this is no checkpoint of these scripts")
    return content


def halved(name: str, tensor: Tensor) -> Tensor:
    """Returns a weight in half precision; what has fewer than 2 axes stays as it is.

    Those are biases and a normaliser's statistics: small, and a count of samples would overflow.

    Raises:
        UsageError: a value is out of half precision's range.
    """
    if tensor.dtype != torch.float32 or tensor.dim() < 2:
        return tensor
    half = tensor.half()
    if not half.isfinite().all():
        raise UsageError(f"--half: {name} has values beyond 65504, or not finite ones; use --no-half")
    return half


def agent_file(checkpoint: dict[str, Any], half: bool) -> dict[str, Any]:
    """Returns the content of the agent file.

    Raises:
        UsageError: its weights do not fit half precision.
    """
    content = {name: checkpoint[name] for name in DESCRIPTION}
    # Paths on this machine: of no use elsewhere, and nobody's business.
    without_paths = {"run_dir": "runs", "resume": None, "evaluate": None}
    content["args"] = {name: without_paths.get(name, value) for name, value in checkpoint["args"].items()}
    content["agent"] = {name: halved(name, x) if half else x for name, x in checkpoint["agent"].items()}
    return content


def write_atomically(path: Path, content: dict[str, Any]) -> None:
    """Writes a file in one step: what is at `path` is the old file or the new one, never half."""
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


def main() -> None:
    """Runs the command line: status 0 when done, 1 when writing failed, 2 when the arguments are wrong."""
    args = tyro.cli(Args)
    try:
        if args.out.resolve() == args.checkpoint.resolve():
            raise UsageError(f"{args.out}: would replace the checkpoint, which only then can be resumed")
        if not args.out.parent.is_dir():
            raise UsageError(f"{args.out}: there is no folder {args.out.parent}")
        content = agent_file(read_checkpoint(args.checkpoint), args.half)
        write_atomically(args.out, content)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    before, after = (path.stat().st_size / 2**20 for path in (args.checkpoint, args.out))
    print(f"{args.out}: {after:.1f} MiB of {before:.1f}")
    print(f"look at it: python {content['script']}.py --evaluate {shlex.quote(str(args.out))}")


if __name__ == "__main__":
    main()
