"""Read prompts: the lines of a file, or lines that are typed, pasted or piped to standard input."""

import importlib
import importlib.util
import logging
import sys
from contextlib import suppress
from pathlib import Path

import click

from neox_config.errors import ConfigError, NeoXError
from neox_config.pluralize import pluralize

__all__ = ["read_prompt", "read_prompts"]

logger = logging.getLogger(__name__)

_PROMPT = "prompt (/help for commands, Ctrl-D to exit)> "
_BYTE_ORDER_MARK = "\ufeff"
# Of a line of a terminal, the kernel passes on this many bytes with the newline, and drops the others.
_TERMINAL_LINE_BYTES = 4096


def read_prompts(path: Path) -> list[tuple[int, str]]:
    """Return (line number, prompt) for the non-empty lines of a UTF-8 file. Only a newline ends a line.

    Prompts are stripped. The numbers of prompts and of empty lines are logged.

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
    lines = text.removeprefix(_BYTE_ORDER_MARK).removesuffix("\n").split("\n")
    prompts = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ConfigError(f"sample_input_file {path} contains no prompts; write one prompt per line")
    empty = len(lines) - len(prompts)
    left_out = pluralize(empty, "empty line is", "empty lines are")
    logger.info("%s: %s; %s left out", path, pluralize(len(prompts), "prompt"), left_out)
    return prompts


def read_prompt() -> str | None:
    """Return the next line of standard input, stripped; None at its end. May raise KeyboardInterrupt.

    Raises:
        NeoXError: it cannot be read.
    """
    # readline requires a terminal for its prompt; with neox-launch, both outputs are pipes.
    is_typed = sys.stdin.isatty() and sys.stdout.isatty()
    if not is_typed:
        click.echo(_PROMPT, nl=False, err=True)
    try:
        line = _typed() if is_typed else _piped()
    except OSError as error:
        # A process in the background may not read its terminal.
        raise NeoXError(
            f"cannot read prompts from standard input: {error.strerror}; run in the foreground of a terminal "
            "that stays open, or set sample_input_file",
            code="not-readable",
        ) from error
    return None if line is None else line.removeprefix(_BYTE_ORDER_MARK).strip()


def _piped() -> str | None:
    line = sys.stdin.buffer.readline()
    if sys.stdin.isatty() and len(line) >= _TERMINAL_LINE_BYTES:
        logger.warning(
            "the prompt was cut: the terminal passes on at most 4,095 bytes of a line; use sample_input_file "
            "or a pipe for longer prompts"
        )
    text = line.decode(errors="replace")
    if text.encode() != line:
        logger.warning("the prompt is not UTF-8: wrong bytes are replaced by U+FFFD")
    return text or None


def _typed() -> str | None:
    """Read a line from the terminal with readline: without it, the kernel drops what exceeds 4,095 bytes."""
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    if importlib.util.find_spec("readline") is not None:
        # Lines that are pasted together are separate prompts.
        importlib.import_module("readline").parse_and_bind("set enable-bracketed-paste off")
    with suppress(EOFError):
        return input(_PROMPT)
    return None
