"""Render a model's chat template; runs as a child process of its own.

A template comes with a downloaded model and is as untrusted as any program from there. jinja2's
immutable sandbox keeps it from Python's internals and from changing its input; it has no loader,
so it can include nothing. What the sandbox can't bound (time, memory, a huge constant folded at
compile time) the process does: an alarm and an address-space limit end it, and the host starts
another. This file imports jinja2 and the standard library only, so the child starts in a blink.

Frames on stdin and stdout: 4 bytes length, big-endian, then JSON.
"""

from __future__ import annotations

import datetime
import json
import signal
import sys
from collections.abc import Callable
from typing import IO, Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

__all__ = ["TemplateProblem", "compile_template", "main", "read_frame", "render", "write_frame"]

OUTPUT_LIMIT_CHARS = 32 * 1024 * 1024
MEMORY_LIMIT_BYTES = 1024**3
RANGE_LIMIT = 100_000


class TemplateProblem(Exception):  # noqa: N818 -- it becomes an error on the host's side
    """Why a template gave no prompt. `kind`: syntax, refused (by its own raise_exception), failed."""

    def __init__(self, kind: str, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.line = line


class _Refused(Exception):  # noqa: N818 -- not an error of ours
    """The template called raise_exception."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the model's own words for training; when serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object = "") -> None:
    raise _Refused(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and &, which would change what the model reads.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _bounded_range(*arguments: int) -> range:
    numbers = range(*arguments)
    if len(numbers) > RANGE_LIMIT:
        raise OverflowError(f"range of {len(numbers)} numbers; the limit is {RANGE_LIMIT}")
    return numbers


def compile_template(source: str) -> jinja2.Template:
    """Return the template, ready to render.

    Raises:
        TemplateProblem: it is not valid; `line` says where.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.LoopControlExtension, _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["range"] = _bounded_range
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as problem:
        raise TemplateProblem("syntax", problem.message or "not valid", problem.lineno) from None
    except (RecursionError, MemoryError, OverflowError, ValueError) as problem:
        raise TemplateProblem("syntax", _one_line(problem)) from None


def render(template: jinja2.Template, context: dict[str, Any], limit_chars: int = OUTPUT_LIMIT_CHARS) -> str:
    """Return the prompt.

    Raises:
        TemplateProblem: the template refused the conversation, broke the sandbox's rules, or grew too large.
    """
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate(**context):
            size += len(piece)
            if size > limit_chars:
                raise TemplateProblem("failed", f"wrote more than {limit_chars} characters")
            pieces.append(piece)
    except _Refused as refusal:
        raise TemplateProblem("refused", str(refusal)) from None
    except TemplateProblem:
        raise
    except Exception as problem:  # noqa: BLE001 -- a template can raise whatever Python can
        raise TemplateProblem("failed", _one_line(problem), _template_line(problem)) from None
    return "".join(pieces)


def _template_line(problem: BaseException) -> int | None:
    """Return the template's line that the innermost frame of the template belongs to."""
    line = None
    trace = problem.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _one_line(problem: BaseException) -> str:
    text = " ".join(str(problem).split())
    return (text or type(problem).__name__)[:300]


# --- the child process -----------------------------------------------------------------------


def read_frame(stream: IO[bytes]) -> Any:
    """Return the next message, or None at the end of the stream."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    body = stream.read(int.from_bytes(header, "big"))
    return json.loads(body)


def write_frame(stream: IO[bytes], message: object) -> None:
    """Write one message and flush it."""
    body = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    stream.write(len(body).to_bytes(4, "big") + body)
    stream.flush()


def _limit_process() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass  # macOS knows no address-space limit; the alarm still holds
    # The terminal's Ctrl-C is the host's to handle; it closes our stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _answer(request: dict[str, Any], templates: dict[str, jinja2.Template]) -> dict[str, Any]:
    try:
        source: str = request["source"]
        if source not in templates:
            templates.clear()
            templates[source] = compile_template(source)
        if "context" not in request:
            return {"text": ""}
        return {"text": render(templates[source], request["context"])}
    except TemplateProblem as problem:
        return {"kind": problem.kind, "message": problem.message, "line": problem.line}
    except (MemoryError, RecursionError) as problem:
        return {"kind": "failed", "message": _one_line(problem), "line": None}


def main(alarm: Callable[[float], object] | None = None) -> None:
    """Answer requests until stdin closes; a request that outlives its limit ends the process."""
    _limit_process()
    set_alarm = alarm or (lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds))
    templates: dict[str, jinja2.Template] = {}
    while (request := read_frame(sys.stdin.buffer)) is not None:
        # SIGALRM's default action ends the process even inside a single call into C.
        set_alarm(float(request["limit_s"]))
        answer = _answer(request, templates)
        set_alarm(0.0)
        write_frame(sys.stdout.buffer, answer)


if __name__ == "__main__":
    main()
