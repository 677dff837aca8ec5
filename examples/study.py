"""Does training with the sampled gradient end where training with the exact one does?

    python examples/study.py train --out runs/study          # every way to compute the loss, on the same batches
    python examples/study.py noise --out runs/study          # its noise next to that of the mini-batch
    python examples/study.py adam-tail --out runs/study      # how far Adam moves rare rows of the classifier
    python examples/study.py finetune --out runs/study --head HEAD.npz --hidden HIDDEN.npz
    python examples/study.py plots --out runs/study          # pictures and a summary from the tables alone

Each command starts from nothing, uses all GPUs of the machine (independent runs, no communication) and leaves a CSV
file in the run folder, then ``plots`` is called. ``train --time-limit`` shortens all runs evenly before they start.
``--preset tiny`` is a rehearsal for a CPU.

The text: ``--tokens FOLDER``, prepared by ``examples/text_data.py``, or ``--data`` (default: Python's own sources),
which needs mistral-common for its tokenizer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import study_plots
import study_pool
import text_data
from command_line import Parser, fail, positive
from study_model import SEQ_LEN, SIZES


def make_parser() -> Parser:
    """All subcommands."""
    import argparse

    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = Parser(add_help=False)
    shared.add_argument("--out", type=Path, default=Path("runs/study"), help="folder of the results")
    runs = Parser(add_help=False, parents=[shared])
    runs.add_argument("--preset", choices=("full", "tiny"), default="full", help="tiny: minutes on a CPU")
    runs.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    runs.add_argument("--no-plots", action="store_true", help="leave the tables only")
    text = Parser(add_help=False, parents=[runs])
    text.add_argument("--tokens", type=Path, help="folder of prepared tokens")
    text.add_argument("--data", type=Path, nargs="+", default=(), help="text files or folders")
    text.add_argument("--seq-len", type=positive, help=f"tokens of a sequence (default: {SEQ_LEN}; tiny: 32)")

    train = commands.add_parser("train", parents=[text], help="train.csv: loss by mode, size and batch")
    train.add_argument("--time-limit", type=float, default=480.0, metavar="S", help="seconds in all (default: 480)")
    train.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=(), help="leave out the other sizes")
    train.add_argument("--batches", nargs="+", type=positive, default=(), help="leave out other tokens a step")
    train.add_argument("--eval-tokens", type=positive, help="held-out tokens (default: 65536; tiny: 512)")
    train.add_argument("--evaluations", type=positive, help="times they are looked at (default: 8; tiny: 2)")
    commands.add_parser("noise", parents=[text], help="noise.csv: variance over batches and over samples")
    commands.add_parser("adam-tail", parents=[text], help="adam_tail.csv: drift of rare rows by tokens a step")
    tune = commands.add_parser("finetune", parents=[runs], help="finetune.csv: a real head on another domain")
    tune.add_argument("--head", type=Path, required=True, help="npz: q int8 [V, D], scale fp16 [V, D/32]")
    tune.add_argument("--hidden", type=Path, required=True, help="npz: e_bf16 int16 [N, D], targets int32 [N]")
    commands.add_parser("plots", parents=[shared], help="pictures and summary.md from the tables in --out")
    return parser


def tokens_folder(options: Any) -> Path:
    """Where the tokens of the text lie; tokenizes it if they aren't there yet."""
    if options.tokens is not None:
        return options.tokens
    text_data.check_paths(options.data)
    folder = options.out / "tokens"
    text_data.load_corpus(options.data, 0.04, folder, lambda done, total: None)
    return folder


def run(options: Any) -> None:
    """The subcommand; raises ValueError for what the user has to change."""
    options.out.mkdir(parents=True, exist_ok=True)
    if options.command != "plots":
        tiny = options.preset == "tiny"
        devices = study_pool.choose_devices(options.device)
        if options.command != "finetune":
            folder, seq_len = tokens_folder(options), options.seq_len or (32 if tiny else SEQ_LEN)
    if options.command == "train":
        import study_train

        study_train.main(
            study_train.Options(
                preset=options.preset,
                tokens=folder,
                seq_len=seq_len,
                out=options.out,
                devices=devices,
                time_limit=options.time_limit,
                eval_tokens=options.eval_tokens or (512 if tiny else 65_536),
                evaluations=options.evaluations or (2 if tiny else 8),
                sizes=tuple(options.sizes),
                batches=tuple(options.batches),
            )
        )
    elif options.command == "noise":
        import study_noise

        study_noise.main(options.preset, folder, seq_len, options.out, devices)
    elif options.command == "adam-tail":
        import study_adam

        study_adam.main(options.preset, folder, seq_len, options.out, devices)
    elif options.command == "finetune":
        import study_finetune

        study_finetune.main(options.preset, options.head, options.hidden, options.out, devices)
    if options.command == "plots" or not options.no_plots:
        for path in study_plots.draw_all(options.out):
            print(path)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    try:
        run(make_parser().parse_args(argv))
    except ValueError as error:
        fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
