"""Choose which plugin serves a request, and keep a reason per candidate and stage.

Pure: a request, the machine as probed, and the candidates go in; a decision and its records
come out. Finding candidates is `discovery`, measuring the machine is `hardware`, verifying
bytes and starting the chosen worker are `launch` and `workers`; what those two saw of an
earlier attempt comes back in as `outcomes`.

`candidate` has the values, `stages` judges one candidate, `choice` chooses among them.
"""

from vox_host.resolution.candidate import AUTO, STAGES, Candidate, Problem, Request, Stage, StageRecord
from vox_host.resolution.choice import Resolution, explain, named_plugin, resolve
from vox_host.resolution.known import why_not_here
from vox_host.resolution.stages import platform_refusal

__all__ = [
    "AUTO",
    "STAGES",
    "Candidate",
    "Problem",
    "Request",
    "Resolution",
    "Stage",
    "StageRecord",
    "explain",
    "named_plugin",
    "platform_refusal",
    "resolve",
    "why_not_here",
]
