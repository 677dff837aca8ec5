"""The command ``cce-tp``: what it can do, and which module does it."""

from __future__ import annotations

import argparse
import importlib
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

from .console import EXIT_USAGE, Parser, UsageError, fail

PROGRAM = "cce-tp"
OWN = {
    "accuracy": ".accuracy",
    "bench": ".bench",
    "bench-tp": ".bench_tp",
    "doctor": ".doctor",
    "keep-rate": ".keep_rate",
    "plan": ".plan",
    "tune": ".tune",
}
"""Subcommands made of ``HELP``, ``add_arguments`` and ``run``."""
TRAIN = "train"
"""Its arguments are the example's own."""
OF_THE_EXAMPLE = ("matplotlib", "mistral_common", "rich")


def example(name: str) -> Path:
    """A script of the examples, which lie beside ``launch`` in the repository and in the installed package alike.

    Raises:
        UsageError: they don't.
    """
    path = Path(__file__).resolve().parent.parent / "examples" / name
    if not path.is_file():
        raise UsageError(f"{path} is missing: install cce_tp again, or run {name} from the repository")
    return path


def train(arguments: list[str]) -> int:
    """Run the main example in this process, as a launcher would have."""
    script = example("pretrain_gpt.py")
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except ModuleNotFoundError as error:
        if error.name not in OF_THE_EXAMPLE:
            raise
        raise UsageError(f"train needs the package {error.name}: pip install 'cce_tp[examples]'") from None
    return 0


def make_parser() -> Parser:
    """All subcommands."""
    parser = Parser(
        prog=PROGRAM,
        description="Start runs of cce_tp, and see what it does to a model. 'cce-tp COMMAND --help' says more.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, module_name in OWN.items():
        module = importlib.import_module(module_name, __package__)
        subparser = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    commands.add_parser(TRAIN, help="run the example examples/pretrain_gpt.py", add_help=False)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand; the exit status: 0, 1 if a check failed, 2 for what makes no sense."""
    given = sys.argv[1:] if arguments is None else arguments
    # The deepspeed launcher adds this to every command; the environment says the same.
    given = [argument for argument in given if not re.fullmatch(r"--local[_-]rank=\d+", argument)]
    command = given[0] if given else ""
    try:
        if command == TRAIN:
            return train(given[1:])
        options = make_parser().parse_args(given)
        command = options.command
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except UsageError as error:
        fail(f"{PROGRAM} {command}", str(error))
    return EXIT_USAGE
