"""A model's chat template, rendered in a child process with limits.

`rendering` is the child's side and says why there is a child. It is started by the first use,
serves all later ones (well under a millisecond each), and is replaced when it had to be ended.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from vox_host.chat import rendering
from vox_host.chat.protection import ProtectedText, Protector
from vox_host.errors import ModelError, UsageError

__all__ = ["ChatTemplate"]

LIMIT_S = 5.0


class ChatTemplate:
    """Conversation in, prompt out. Calls block: use a thread where an event loop runs."""

    def __init__(
        self,
        source: str,
        *,
        name: str,
        special_tokens: dict[str, str],
        protect: list[str],
        limit_s: float = LIMIT_S,
    ) -> None:
        """`name` says in errors where the template is from; `special_tokens` are variables like bos_token;
        `protect` are the texts that messages must not smuggle in."""
        self.name = name
        self._source = source
        self._special_tokens = special_tokens
        self._protector = Protector(protect)
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def check(self) -> None:
        """Compile the template.

        Raises:
            ModelError: it has a syntax error; the message has its line.
        """
        answer = self._ask({})
        if "kind" in answer:
            raise ModelError(
                "template-syntax",
                f"the chat template of {self.name} does not compile{_at_line(answer)}: {answer['message']}",
                remedy="Chat requests are refused until the template is repaired; completions work.",
            )

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
        variables: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> ProtectedText:
        """Return the prompt for `messages`, with the places that are no markup.

        Raises:
            UsageError: the template refused the conversation, or broke a rule or limit.
        """
        (messages, tools, variables), mark = self._protector.protect([messages, tools, variables or {}])
        context = {
            **variables,
            **self._special_tokens,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        answer = self._ask({"context": context})
        if "kind" in answer:
            raise self._error(answer)
        return Protector.unmark(answer["text"], mark)

    def close(self) -> None:
        """End the child, if there is one."""
        with self._lock:
            self._end_child()

    def _error(self, answer: dict[str, Any]) -> UsageError:
        if answer["kind"] == "refused":
            return UsageError(
                "template-refused",
                f"the chat template of {self.name} refused these messages: {answer['message']}",
                remedy="Change the messages as it says.",
            )
        return UsageError(
            "template-failed",
            f"the chat template of {self.name} could not be rendered{_at_line(answer)}: {answer['message']}",
            remedy="/v1/completions works without a template.",
        )

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            child = self._running_child()
            assert child.stdin is not None and child.stdout is not None
            # The child limits itself; the timer is for one that can't even do that.
            timer = threading.Timer(self._limit_s + 2.0, child.kill)
            timer.start()
            answer: dict[str, Any] | None = None
            try:
                rendering.write_frame(
                    child.stdin, {**request, "source": self._source, "limit_s": self._limit_s}
                )
                answer = rendering.read_frame(child.stdout)
            except (OSError, ValueError):
                answer = None
            finally:
                timer.cancel()
            if answer is None:
                self._end_child()
                problem = f"it did not finish within its limits ({self._limit_s:g} s of time)"
                return {"kind": "failed", "message": problem, "line": None}
            return answer

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._end_child()
            self._child = subprocess.Popen(
                [sys.executable, "-I", str(Path(rendering.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
            )
        return self._child

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unwritten bytes for a reader that is gone
                    pipe.close()


def _at_line(answer: dict[str, Any]) -> str:
    return f" (line {answer['line']})" if answer.get("line") else ""
