"""Read prompts, which end with a newline or another string, from a file or from standard input."""

import importlib
import importlib.util
import logging
import sys
from contextlib import suppress
from pathlib import Path

import click

from neox_config.errors import ConfigError, NeoXError
from neox_config.pluralize import pluralize

__all__ = ["Prompts", "read_prompts"]

logger = logging.getLogger(__name__)

_PROMPT = "prompt (/help for commands, Ctrl-D to exit)> "
_FURTHER_LINE = "... "
_BYTE_ORDER_MARK = "\ufeff"


def read_prompts(path: Path, end: str = "\n") -> list[tuple[int, str]]:
    """Return (line number, prompt) for the prompts of a UTF-8 file, without empty ones.

    Prompts are stripped. The numbers of prompts and of empty ones are logged.

    Args:
        path: the file.
        end: what ends each prompt but the last, which the end of the file may end.

    Raises:
        NeoXError: the file cannot be read, or is not UTF-8.
        ConfigError: it contains no prompts.
    """
    try:
        content = path.read_bytes()
        text = content.decode()
    except OSError as error:
        raise NeoXError(f"cannot read sample_input_file {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise NeoXError(
            f"sample_input_file {path}, line {line}: byte 0x{content[error.start]:02x} is not UTF-8; convert "
            "the file, for example with iconv"
        ) from error
    found = text.removeprefix(_BYTE_ORDER_MARK).split(end)
    if found[-1] in ("", "\n"):
        found.pop()
    prompts, number = [], 1
    for prompt in found:
        blank = len(prompt) - len(prompt.lstrip())
        if prompt.strip():
            prompts.append((number + prompt.count("\n", 0, blank), prompt.strip()))
        number += (prompt + end).count("\n")
    if not prompts:
        raise ConfigError(
            f"sample_input_file {path} contains no prompts; write prompts, each followed by "
            f"prompt-end ({end!r})"
        )
    empty, unit = len(found) - len(prompts), "line" if end == "\n" else "prompt"
    left_out = pluralize(empty, f"empty {unit} is", f"empty {unit}s are")
    logger.info("%s: %s; %s left out", path, pluralize(len(prompts), "prompt"), left_out)
    return prompts


class Prompts:
    """Reads prompts from standard input.

    Args:
        end: what ends each prompt but the last, which the end of the input may end.
    """

    def __init__(self, end: str = "\n") -> None:
        self._end = end
        self._text = ""

    def read(self) -> str | None:
        """Return the next prompt, stripped; None at the end of the input. May raise KeyboardInterrupt.

        An interrupt drops the lines of a prompt without its end.

        Raises:
            NeoXError: the input cannot be read.
        """
        while self._end not in self._text:
            # Taken back only if a line follows.
            text, self._text = self._text, ""
            line = _read_line(_FURTHER_LINE if text.strip() else _PROMPT)
            if line is None:
                return text.strip() or None
            self._text = text + line
        prompt, _, self._text = self._text.partition(self._end)
        return prompt.strip()


def _read_line(shown: str) -> str | None:
    """Return the next line of standard input, with its newline; None at its end."""
    # readline requires a terminal for its prompt; with neox-launch, both outputs are pipes.
    is_typed = sys.stdin.isatty() and sys.stdout.isatty()
    if not is_typed:
        click.echo(shown, nl=False, err=True)
    try:
        line = _typed(shown) if is_typed else _piped()
    except OSError as error:
        # A process in the background may not read its terminal.
        raise NeoXError(
            f"cannot read prompts from standard input: {error.strerror}; run in the foreground of a terminal "
            "that stays open, or set sample_input_file",
            code="not-readable",
        ) from error
    return None if line is None else line.removeprefix(_BYTE_ORDER_MARK)


def _piped() -> str | None:
    return sys.stdin.buffer.readline().decode(errors="replace") or None


def _typed(shown: str) -> str | None:
    """Read a line from the terminal with readline: without it, the kernel drops what exceeds 4,095 bytes."""
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    if importlib.util.find_spec("readline") is not None:
        # Lines that are pasted together are separate prompts.
        importlib.import_module("readline").parse_and_bind("set enable-bracketed-paste off")
    with suppress(EOFError):
        return f"{input(shown)}\n"
    return None
