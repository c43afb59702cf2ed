"""Start, supervise, restart and stop plugin processes.

`Supervisor` is what the rest of the host uses; `LaunchPlan` says what to start. Choosing a
plugin is `resolution`, checking its bytes `integrity`: both are done before a plan exists.
"""

from vox_host.workers.connection import Event
from vox_host.workers.launch import LaunchPlan, Limits, worker_environment
from vox_host.workers.supervisor import Supervisor, WorkerState
from vox_host.workers.training import TrainingClient
from vox_host.workers.worker import Worker

__all__ = [
    "Event",
    "LaunchPlan",
    "Limits",
    "Supervisor",
    "TrainingClient",
    "Worker",
    "WorkerState",
    "worker_environment",
]
