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
OWN = {"doctor": ".doctor", "keep-rate": ".keep_rate", "plan": ".plan"}
"""Subcommands made of ``HELP``, ``add_arguments`` and ``run``."""
PASSED_ON = {
    "accuracy": "distance of each backward mode from the fp32 gradient, on a model's head and hidden states",
    "bench": "time and memory of the kernels on one GPU (--sampled: of the sampled mode, on realistic logits)",
    "train": "run the example examples/pretrain_gpt.py",
}
"""Subcommands with a command line of their own, also usable as ``python -m cce_tp.launch.bench`` and so on."""


def _passed_on(command: str, arguments: list[str]) -> int:
    if command == "train":
        return train(arguments)
    module = command
    if command == "bench" and "--sampled" in arguments:
        arguments = [argument for argument in arguments if argument != "--sampled"]
        module = "bench_sampled"
    try:
        main: Callable[[list[str]], None] = importlib.import_module(f".{module}", __package__).main
    except ImportError as error:
        raise UsageError(f"{command} needs a package that is not installed: {error}") from None
    main(arguments)
    return 0


def example(name: str) -> Path:
    """A script of the examples, which are not installed but lie beside the package's sources.

    Raises:
        UsageError: they don't.
    """
    path = Path(__file__).resolve().parent.parent / "examples" / name
    if not path.is_file():
        raise UsageError(f"{name} is not here: the examples belong to the repository, not to the installed package")
    return path


def train(arguments: list[str]) -> int:
    """Run the main example in this process, as a launcher would have."""
    script = example("pretrain_gpt.py")
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
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
    for name, what in PASSED_ON.items():
        commands.add_parser(name, help=what, add_help=False)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand; the exit status: 0, 1 if a check failed, 2 for what makes no sense."""
    given = sys.argv[1:] if arguments is None else arguments
    # The deepspeed launcher adds this to every command; the environment says the same.
    given = [argument for argument in given if not re.fullmatch(r"--local[_-]rank=\d+", argument)]
    command = given[0] if given else ""
    try:
        if command in PASSED_ON:
            return _passed_on(command, given[1:])
        options = make_parser().parse_args(given)
        command = options.command
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except UsageError as error:
        fail(f"{PROGRAM} {command}", str(error))
    return EXIT_USAGE
