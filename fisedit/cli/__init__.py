"""The command line: `fisedit generate`, `edit`, `show`, `drive`, `demo`, `batch`, `calibrate`, `plan`, `doctor`,
`validate`, `train-adapter`, `app`, `serve` and `bench`.

Commands contain no torch, and import what needs it after their arguments are checked.
"""

from __future__ import annotations

import re
import sys
import traceback
from itertools import pairwise

import typer

from fisedit.cli import commands, console, diagnosis, edit
from fisedit.cli import options as opt
from fisedit.cli.bench import bench
from fisedit.cli.clip import drive
from fisedit.errors import InputError
from fisedit.machine.malloc import keep_freed_memory
from fisedit.machine.openmp import set_up_threads

_INTERRUPTED = 130  # typer's status for a KeyboardInterrupt

_NO_NUMBER = re.compile(r"Invalid value for '(--[\w-]+)': Input should be a valid (\w+), unable to parse")
_KINDS = {"integer": "whole number"}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def fisedit(
    version: opt.Version = False,
    debug: opt.Debug = False,
) -> None:
    """Edit a generated picture by changing words, and compute only what changes."""


for command in (edit.generate, edit.edit, edit.show, drive, commands.demo, commands.batch):
    app.command()(command)
for check in (diagnosis.calibrate, diagnosis.plan, diagnosis.doctor, diagnosis.validate):
    app.command()(check)
app.command("train-adapter")(commands.train_adapter)
app.command("app")(commands.browse)
app.command("serve")(commands.serve)
app.add_typer(bench, name="bench")


def main(program: typer.Typer = app, name: str = "fisedit") -> None:
    """Run a command line. Every error is one line on stderr; a traceback only with --debug.

    Args:
        program: The commands.
        name: The program's name in its help and messages.
    """
    keep_freed_memory()
    set_up_threads()
    console.escape_unprintable_text()
    arguments = sys.argv[1:] or (["--help"] if program is app else [])
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    sys.exit(_run(program, name, arguments, debug=debug))


def _check_unicode(arguments: list[str]) -> None:
    """Refuse arguments with undecodable bytes before any work: neither messages nor metadata can contain them."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"arguments must be UTF-8 text, got {argument!a}; rename or retype it") from error


def _wrong_value(arguments: list[str], option: str, kind: str) -> str:
    """The first value of an option that is no number of a kind, beside it or behind a "="."""
    given = [value for name, value in pairwise(arguments) if name == option]
    given += [each.removeprefix(f"{option}=") for each in arguments if each.startswith(f"{option}=")]
    return next(
        (value for value in given if not _is_number(value, int if kind == "integer" else float)), "something else"
    )


def _is_number(text: str, kind: type[int | float]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _usage_line(error: typer.TyperException, arguments: list[str]) -> str:
    """Return what is wrong with the arguments, and whose help to read; with the value that typer leaves out."""
    line, context = error.format_message().rstrip("."), getattr(error, "ctx", None)
    if found := _NO_NUMBER.match(line):
        option, kind = found.groups()
        line = f"{option} must be a {_KINDS.get(kind, kind)}, got {_wrong_value(arguments, option, kind)!r:.40}"
    elif "unexpected extra argument" in line:
        line += "; put a prompt in quotes"
    return f"{line}{' See' if line.endswith('?') else '; see'} {context.command_path if context else 'fisedit'} --help"


def _run(program: typer.Typer, name: str, arguments: list[str], *, debug: bool) -> int:
    try:
        _check_unicode(arguments)
        status = int(program(arguments, prog_name=name, standalone_mode=False) or 0)
        console.flush()
        return console.print_error(KeyboardInterrupt()) if status == _INTERRUPTED else status
    except typer.TyperException as error:
        return console.print_error_line("usage", _usage_line(error, arguments), 2)
    except BrokenPipeError:  # the reader of stdout has exited, as `head` does: no message, and typer's own status
        console.discard_output(sys.stdout)
        return 1
    except Exception as error:  # noqa: BLE001 (the border of the process: any error becomes one line)
        if debug:
            traceback.print_exception(error)
        return console.print_error(error)
