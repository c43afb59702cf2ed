"""The worker process: `python -I -B -m vox_plugin_api.child PLUGIN_ID`.

The number of the private descriptor is in `VOX_PLUGIN_FD`. Before a line of the plugin runs,
standard output is pointed at standard error, so that nothing it prints can reach the protocol,
and the kernel is told to end this process with its host. Then: handshake, self-test, requests.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from typing import NoReturn

from vox_plugin_api import messages as m
from vox_plugin_api.backend import Backend, BackendError
from vox_plugin_api.framing import FrameChannel, ProtocolError, decode_to_worker
from vox_plugin_api.installed import InstalledPlugin, describe_range, find_plugin
from vox_plugin_api.request_loop import EXIT_HOST_GONE, RequestLoop, internal_error

__all__ = ["FD_VARIABLE", "die_with_parent", "main"]

FD_VARIABLE = "VOX_PLUGIN_FD"
EXIT_USAGE = 2
EXIT_REFUSED = 3
STAGE_MARK = "vox-plugin-api: "
"""Begins a line of the log that says what a start is doing."""
_PR_SET_PDEATHSIG = 1
_SELF_TEST_REMEDY = "`vox-host plugin check {} --only operators` shows its author what differs."


def main(arguments: list[str]) -> int:
    """Serve plugin `arguments[0]` to the host at the other end of the descriptor."""
    fd = _private_descriptor()
    if len(arguments) != 1 or fd is None:
        print(  # noqa: T201  a person typed this command; there is no host to tell
            f"usage: {FD_VARIABLE}=N python -I -B -m vox_plugin_api.child PLUGIN_ID\n"
            "vox-host starts workers itself; `vox-host plugin list` shows what it can start.",
            file=sys.stderr,
        )
        return EXIT_USAGE
    _point_stdout_at_stderr()
    die_with_parent(os.getppid())
    faulthandler.enable(file=sys.stderr)

    channel = FrameChannel(fd)
    try:
        backend, refusal = _shake_hands(channel, arguments[0])
    except BackendError as error:
        channel.send(m.Refused(error=error.error))
        return EXIT_REFUSED
    return RequestLoop(channel, backend, refusal).run()


def _private_descriptor() -> int | None:
    """Take the descriptor out of the environment and out of reach of the plugin's own children."""
    number = os.environ.pop(FD_VARIABLE, "")
    if not number.isdigit():
        return None
    try:
        os.set_inheritable(int(number), False)
    except OSError:
        return None
    return int(number)


def _point_stdout_at_stderr() -> None:
    sys.stdout.flush()
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the process that started it dies, whoever holds the GIL then.

    Elsewhere than on Linux the host's watchdog process does it. Both are needed only once
    plugin code runs: before that, the handshake's read sees the host's end close.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before it could be tied to us
        os._exit(EXIT_HOST_GONE)


def _shake_hands(channel: FrameChannel, plugin_id: str) -> tuple[Backend, m.WorkerError | None]:
    """Return the backend, and why it may only be checked, if its self-test failed."""
    hello = _receive_hello(channel)
    plugin = find_plugin(plugin_id)
    protocol = _agree(hello, plugin, plugin_id)
    _note_stage(f"running the entry point {plugin.entry_point.value}")
    backend = _load_backend(plugin)
    _note_stage("running the self-test")
    refusal = None
    try:
        _self_test(backend)
    except BackendError as error:
        if hello.purpose != "check":
            raise
        refusal = error.error
    channel.send(
        m.WorkerHello(
            protocol=protocol,
            plugin_id=plugin.plugin_id,
            plugin_version=plugin.version,
            manifest_digest=plugin.manifest_digest,
            lane=backend.info.lane,
            numerics=list(backend.info.numerics),
            capabilities=list(backend.info.capabilities),
            execution=backend.info.execution,
            pid=os.getpid(),
            nonce=hello.nonce,
        )
    )
    return backend, refusal


def _note_stage(stage: str) -> None:
    """Write to the log how far the start has come, for a host that waits in vain or sees the end."""
    os.write(2, f"{STAGE_MARK}{stage}\n".encode())


def _receive_hello(channel: FrameChannel) -> m.HostHello:
    try:
        frame = channel.read()
        if frame is None:
            os._exit(EXIT_HOST_GONE)
        hello = decode_to_worker(frame)
    except ProtocolError as error:
        raise BackendError("protocol-error", error.message, facts=error.facts) from None
    if not isinstance(hello, m.HostHello) or hello.magic != m.MAGIC:
        raise BackendError(
            "protocol-error",
            f"the first message must be host_hello with magic {m.MAGIC!r}, found {hello.type!r}",
        )
    return hello


def _agree(hello: m.HostHello, plugin: InstalledPlugin, plugin_id: str) -> m.ProtocolRange:
    """Return the versions this worker speaks, once host, manifest and this library share one.

    Nothing of the plugin has been imported yet: a plugin made for another protocol, or one that
    the host did not verify, never runs.
    """
    facts = {
        "plugin": plugin.plugin_id,
        "manifest": str(plugin.manifest_path),
        "manifest_protocol": describe_range(plugin.protocol),
        "worker_protocol": describe_range(m.ProtocolRange(min=m.PROTOCOL_MIN, max=m.PROTOCOL_MAX)),
        "host_protocol": describe_range(hello.protocol),
    }
    spoken = m.ProtocolRange(
        min=max(plugin.protocol.min, m.PROTOCOL_MIN), max=min(plugin.protocol.max, m.PROTOCOL_MAX)
    )
    if spoken.highest_common(hello.protocol) is None:
        raise BackendError(
            "protocol-mismatch",
            f"plugin {plugin.plugin_id!r} speaks protocol {facts['manifest_protocol']} "
            f"({plugin.manifest_path}), its vox-plugin-api {facts['worker_protocol']}, "
            f"this host {facts['host_protocol']}; none of the plugin's code was run",
            facts=facts,
            remedy=f"Install a version of {plugin.plugin_id!r} that speaks protocol "
            f"{facts['host_protocol']}, or the vox-host that speaks {facts['manifest_protocol']}.",
        )
    if plugin.plugin_id != plugin_id or hello.plugin_id != plugin_id:
        raise BackendError(
            "wrong-plugin",
            f"started as {plugin_id!r}, the host expects {hello.plugin_id!r}, "
            f"{plugin.manifest_path} says {plugin.plugin_id!r}; none of the plugin's code was run",
            facts={"manifest": str(plugin.manifest_path)},
        )
    if plugin.manifest_digest != hello.manifest_digest:
        raise BackendError(
            "manifest-mismatch",
            f"{plugin.manifest_path} is not the manifest the host verified; "
            f"none of the code of {plugin_id!r} was run",
            facts={
                "manifest": str(plugin.manifest_path),
                "expected": f"sha256:{hello.manifest_digest}",
                "found": f"sha256:{plugin.manifest_digest}",
            },
        )
    return spoken


def _load_backend(plugin: InstalledPlugin) -> Backend:
    facts = {
        "plugin": plugin.plugin_id,
        "distribution": f"{plugin.distribution} {plugin.version}",
        "entry_point": plugin.entry_point.value,
    }
    try:
        backend = plugin.entry_point.load()()
    except BackendError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  a plugin's start may fail in any way at all
        internal_error(error)
        text = f"{type(error).__name__}: {error}"
        raise BackendError(
            "plugin-load-failed",
            f"the entry point {plugin.entry_point.value!r} of plugin {plugin.plugin_id!r} "
            f"({facts['distribution']}) raised {text}",
            facts={**facts, "exception": text},
            remedy=f"Its author corrects what {plugin.entry_point.value!r} runs; the log has the traceback.",
        ) from None
    if not isinstance(backend, Backend):
        raise BackendError(
            "plugin-load-failed",
            f"entry point {plugin.entry_point.value!r} must return a Backend, found {type(backend).__name__}",
            facts=facts,
            remedy=f"Its author has {plugin.entry_point.value!r} name a callable that returns the backend.",
        )
    differences = plugin.differences(backend.info)
    if differences:
        raise BackendError(
            "manifest-disagrees",
            f"plugin {plugin.plugin_id!r} is not what {plugin.manifest_path} says: {'; '.join(differences)}",
            facts={**facts, "differences": differences},
            remedy="Its author makes Plugin.toml, pyproject.toml and the BackendInfo of the entry point "
            f"{plugin.entry_point.value!r} say the same, and installs it again.",
        )
    return backend


def _self_test(backend: Backend) -> None:
    try:
        result = backend.self_test(m.SelfTestParams()).result
    except BackendError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  a lane's first operators may fail in any way
        internal_error(error)
        raise BackendError(
            "self-test-failed",
            f"the self-test raised {type(error).__name__}: {error}",
            remedy=_SELF_TEST_REMEDY.format(backend.info.plugin_id),
        ) from None
    if not isinstance(result, m.SelfTestResult) or result.cases == 0 or result.failed:
        cases = result.cases if isinstance(result, m.SelfTestResult) else 0
        failed = result.failed if isinstance(result, m.SelfTestResult) else []
        raise BackendError(
            "self-test-failed",
            f"the lane {backend.info.lane!r} failed {len(failed)} of the {cases} cases of its self-test; "
            "it serves nothing",
            facts={"cases": cases, "failed": failed},
            remedy=_SELF_TEST_REMEDY.format(backend.info.plugin_id),
        )


def _run() -> NoReturn:
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    _run()
