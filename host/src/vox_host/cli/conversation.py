"""The turns of `vox-host chat`, at a terminal or from a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from typing import Any

from vox_host.app.service import AnswerPiece, ModelService
from vox_host.cli.output import print_line, print_piece, render_error
from vox_host.errors import ModelError, UsageError, VoxError
from vox_plugin_api import messages as m

__all__ = ["Conversation"]


class Conversation:
    """Reads a line, streams the answer, remembers both."""

    def __init__(
        self, service: ModelService, sampling: m.SamplingParams, *, max_tokens: int | None, system: str | None
    ) -> None:
        self._service = service
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._answering: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Talk until the input ends.

        Raises:
            ModelError: the model has no chat template.
        """
        if not self._service.has_chat_template:
            raise ModelError(
                "no-chat-template",
                f'the model "{self._service.info.name}" has no chat template: a base model continues text, '
                "it does not hold conversations",
                remedy=f'vox-host generate --model {self._service.info.name} --prompt "..."',
            )
        loop = asyncio.get_running_loop()
        threading.Thread(target=_read_lines, args=(loop, self._lines), daemon=True).start()
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        try:
            while True:
                if sys.stdin.isatty():
                    print_piece("you: ")
                line = await self._lines.get()
                if line is None:
                    break
                if line.strip():
                    await self._turn(line)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        print_line("")

    def _interrupted(self) -> None:
        """Ctrl-C: stop the answer; at the prompt, leave."""
        if self._answering is not None:
            self._answering.cancel()
        else:
            self._lines.put_nowait(None)

    async def _turn(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        said: list[str] = []
        self._answering = asyncio.create_task(self._answer(said))
        try:
            await asyncio.gather(self._answering, return_exceptions=True)
            if self._answering.cancelled():
                print_line(" [stopped]")
            elif (problem := self._answering.exception()) is not None:
                if not isinstance(problem, VoxError):
                    raise problem
                # The conversation goes on without the turn that failed.
                print_line(render_error(problem), error=True)
                self._messages.pop()
                return
        finally:
            if not self._answering.done():
                self._answering.cancel()
            self._answering = None
        self._messages.append({"role": "assistant", "content": "".join(said)})

    async def _answer(self, said: list[str]) -> None:
        service = self._service
        ids = await service.encode_chat(self._messages)
        if not ids:
            raise UsageError(
                "prompt-empty",
                "the chat template made no prompt of this conversation",
                remedy="Give a message, or another template with --template.",
            )
        service.check_fits(len(ids))
        params = m.GenerateParams(
            token_ids=ids,
            max_tokens=service.room_for(len(ids), self._max_tokens),
            sampling=self._sampling,
            stop_token_ids=sorted(service.tokenizer.eos_ids),
        )
        async with contextlib.aclosing(service.answer(params)) as items:
            async for item in items:
                if isinstance(item, AnswerPiece):
                    said.append(item.text)
                    print_piece(item.text)
        print_line("")


def _read_lines(loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[str | None]) -> None:
    """Feed the lines of standard input to the loop, then None.

    Reads the descriptor, not sys.stdin: a thread that waits inside sys.stdin would hold its lock
    while the interpreter ends.
    """
    buffer = b""
    while True:
        data = os.read(0, 65536)
        *whole, buffer = (buffer + data).split(b"\n")
        if not data and buffer:
            whole, buffer = [buffer], b""
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            for line in whole:
                loop.call_soon_threadsafe(lines.put_nowait, line.decode("utf-8", "replace"))
            if not data:
                loop.call_soon_threadsafe(lines.put_nowait, None)
        if not data:
            return
