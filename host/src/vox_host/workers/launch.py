"""What is needed to start a worker, and the environment it may see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = ["LaunchPlan", "Limits", "worker_environment"]


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """One verified plugin, ready to start. Whoever makes a plan has checked its bytes."""

    plugin_id: str
    plugin_version: str
    python: Path
    """The interpreter of the plugin's own environment."""
    manifest_digest: str
    """SHA-256 of the installed Plugin.toml; the worker must state the same."""
    log_dir: Path
    """Where each worker process gets a file for its stdout and stderr."""
    extra_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables this plugin gets besides the allowed ones."""
    purpose: Literal["serve", "check"] = "serve"
    """check: started even if it fails its self-test, and then asked for nothing but checks."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long is too long. Reaching one is an error with its own code, never a hang."""

    handshake_timeout_s: float = 90.0
    """From the start of the process to its hello: imports and the self-test."""
    heartbeat_timeout_s: float = 30.0
    """Without a sign of life from a living process."""
    stall_timeout_s: float = 600.0
    """Busy without one finished unit of work."""
    connection_timeout_s: float = 2.0
    """From the end of the connection to the end of the process."""
    shutdown_grace_s: float = 5.0
    """From the polite request to SIGTERM."""
    terminate_grace_s: float = 2.0
    """From SIGTERM to SIGKILL."""
    kill_timeout_s: float = 10.0
    """From SIGKILL to the end of the process."""
    max_restarts: int = 3
    """In a row."""
    healthy_after_s: float = 60.0
    """A worker that has served for so long starts a new row of restarts."""
    backoff_s: float = 0.25
    """Before the first restart; it doubles for each one after."""
    ready_timeout_s: float = 180.0
    """How long a request waits for a worker that is starting again."""


_ALLOWED = frozenset(
    {
        "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP",
        "SYSTEMROOT", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "LD_LIBRARY_PATH", "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH", "CUDA_CACHE_PATH",
        "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
    }
)  # fmt: skip
_ALLOWED_FAMILIES = ("LC_", "NCCL_")
"""NCCL's say how the GPUs of a machine may reach each other, which its owner knows."""
_ALWAYS = {
    # A .pyc written beside a source would change the installed tree that was verified.
    "PYTHONDONTWRITEBYTECODE": "1",
    # Another wheel's torch extension must not load itself into this plugin.
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}


def worker_environment(
    inherited: Mapping[str, str], extra: Mapping[str, str], descriptor: int
) -> dict[str, str]:
    """Return the whole environment of a worker.

    Names are allowed, not forbidden: keys and tokens that a host holds have any name at all, and
    none of them is a worker's business.
    """
    allowed = {
        name: value
        for name, value in inherited.items()
        if name in _ALLOWED or name.startswith(_ALLOWED_FAMILIES)
    }
    return {**allowed, **_ALWAYS, **extra, "VOX_PLUGIN_FD": str(descriptor)}
