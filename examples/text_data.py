"""Text files into batches of tokens, the same on every layout of the run.

    python examples/text_data.py runs/tokens [TEXT ...]

tokenizes ahead of a run, for machines that have the tokens only (``--tokens runs/tokens``); with ``--xz`` into files a
sixth as large, which are as good.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.resources
import importlib.util
import json
import lzma
import os
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

TOKENIZER = "tekken_240911.json"
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

Tokens = npt.NDArray[np.int32]
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class DataError(ValueError):
    """The text or the tokenizer is not usable; the message is one sentence for the user."""


@dataclass(frozen=True)
class Document:
    """One file's text under a name that does not depend on where the folder lies."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens held out, with what is needed to recognise them again."""

    train: Tokens
    held_out: Tokens
    vocab_size: int
    fingerprint: str


def check_paths(paths: Sequence[Path]) -> None:
    """Raise DataError for a path that does not exist."""
    for path in paths:
        if not path.exists():
            raise DataError(f"--data {path} does not exist")


def standard_library() -> list[tuple[str, Path]]:
    """The sources of Python's standard library on this machine, less its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = ((path.relative_to(root), path) for path in root.rglob("*.py"))
    return [(name.as_posix(), path) for name, path in files if not SKIPPED_FOLDERS.intersection(name.parts)]


def named_files(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """Every file at or below ``paths``, hidden ones aside."""
    found = []
    for root in paths:
        if root.is_file():
            found.append((root.name, root))
            continue
        for path in root.rglob("*"):
            name = path.relative_to(root)
            if path.is_file() and not any(part.startswith(".") for part in name.parts):
                found.append((f"{root.name}/{name.as_posix()}", path))
    return found


def read_documents(files: Iterable[tuple[str, Path]]) -> list[Document]:
    """The files that are UTF-8 text, in the order of their names: the same on every machine."""
    documents = []
    for name, path in sorted(files):
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text and "\0" not in text:
            documents.append(Document(name, text))
    return documents


def split(documents: Sequence[Document], held_out: float) -> tuple[list[Document], list[Document]]:
    """Hold out whole files, chosen by a hash of their names; a single file is cut near its end instead."""
    if len(documents) == 1:
        name, text = documents[0].name, documents[0].text
        cut = len(text) - max(1, round(len(text) * held_out))
        return [Document(name, text[:cut])], [Document(name, text[cut:])]
    by_hash = sorted(documents, key=lambda document: hashlib.blake2b(document.name.encode()).digest())
    count = max(1, round(len(documents) * held_out))
    return by_hash[count:], by_hash[:count]


def tokenize(
    documents: Sequence[Document], encode: Callable[[str], list[int]], advance: Callable[[int], None]
) -> Tokens:
    """All documents in one line, each closed by the tokenizer's end token."""
    parts = []
    for document in documents:
        parts.append(np.asarray(encode(document.text), dtype=np.int32))
        advance(len(document.text))
    return np.concatenate(parts)


def fingerprint(documents: Sequence[Document], held_out: float) -> str:
    """Changes with the text, the split and the tokenizer; not with the folder or the machine."""
    digest = hashlib.blake2b(f"{TOKENIZER} {held_out}".encode(), digest_size=8)
    for document in documents:
        digest.update(f"{document.name}\0{len(document.text)}\0{document.text}".encode())
    return digest.hexdigest()


def load_corpus(paths: Sequence[Path], held_out: float, cache: Path, progress: Progress) -> Corpus:
    """Read, split and tokenize the text, or take the tokens from ``cache`` if this text is there already."""
    documents = read_documents(named_files(paths) if paths else standard_library())
    if not documents:
        raise DataError(f"there is no UTF-8 text in {', '.join(map(str, paths)) or 'the standard library'}")
    key = fingerprint(documents, held_out)
    if not (cache / f"{key}.json").exists():
        _write_cache(cache, key, *split(documents, held_out), progress)
    return cached_corpus(cache, key)


def cached_corpus(cache: Path, key: str) -> Corpus:
    """The corpus that ``load_corpus`` left in ``cache``; its tokens stay on disk until they are read."""
    try:
        vocab_size = json.loads((cache / f"{key}.json").read_text())["vocab_size"]
    except (ValueError, LookupError, TypeError):
        raise DataError(f"{cache / f'{key}.json'} is no description of tokens: it names no vocab_size") from None
    train, held_out = (_read_tokens(cache / f"{key}.{part}.npy") for part in ("train", "held-out"))
    return Corpus(train, held_out, vocab_size, key)


def _read_tokens(path: Path) -> Tokens:
    """From the disk as they are needed; if there is only ``path``.xz, all of them now."""
    packed = path.with_name(f"{path.name}.xz")
    if path.exists() or not packed.exists():
        return np.load(path, mmap_mode="r")
    with lzma.open(packed) as file:
        return np.lib.format.read_array(file)


def compress(cache: Path) -> None:
    """Leave a corpus's tokens as ``.npy.xz`` only."""
    for path in sorted(cache.glob("*.npy")):
        path.with_name(f"{path.name}.xz").write_bytes(lzma.compress(path.read_bytes(), preset=4))
        path.unlink()


def share_corpus(
    paths: Sequence[Path], held_out: float, cache: Path, seq_len: int, is_main: bool, progress: Progress
) -> Corpus:
    """Rank 0 tokenizes, the others wait and read what it left; what is wrong with the text is wrong on every rank."""
    answer: list[str | None] = [None, None]
    if is_main:
        try:
            corpus = load_corpus(paths, held_out, cache, progress)
            for tokens in (corpus.train, corpus.held_out):
                Windows(tokens, seq_len)
            answer[0] = corpus.fingerprint
        except DataError as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer, src=0)
    key, problem = answer
    if key is None:
        raise DataError(problem)
    return cached_corpus(cache, key)


def prepared_corpus(cache: Path) -> Corpus:
    """The one corpus in ``cache``, whatever text it is of; neither text nor tokenizer is needed."""
    keys = sorted(path.stem for path in cache.glob("*.json"))
    if len(keys) != 1:
        raise DataError(f"--tokens {cache} must hold the tokens of one text, and holds those of {len(keys)}")
    return cached_corpus(cache, keys[0])


def _write_cache(cache: Path, key: str, train: list[Document], held_out: list[Document], progress: Progress) -> None:
    if importlib.util.find_spec("mistral_common") is None:
        raise DataError("the tokenizer comes with the package mistral-common: pip install mistral-common")
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    tokenizer_file = importlib.resources.files("mistral_common") / "data" / TOKENIZER
    if not tokenizer_file.is_file():
        raise DataError(f"the installed mistral-common does not ship {TOKENIZER}: pip install 'mistral-common>=1.5'")
    tokenizer = Tekkenizer.from_file(str(tokenizer_file))
    total = sum(len(document.text) for document in (*train, *held_out))
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, bos=False, eos=True)

    cache.mkdir(parents=True, exist_ok=True)
    for part, documents in (("train", train), ("held-out", held_out)):
        partial = cache / f"{key}.{part}.partial.npy"
        np.save(partial, tokenize(documents, encode, advance))
        os.replace(partial, cache / f"{key}.{part}.npy")
    # Last, and only when both are there: its presence says that the tokens are complete.
    (cache / f"{key}.json").write_text(json.dumps({"vocab_size": tokenizer.n_words}))


class Windows:
    """Non-overlapping windows of ``seq_len`` tokens and their successors.

    Which windows make up step s depends on s and the seed alone, so that every layout trains on the same global batch
    and a resumed run goes on where it was.
    """

    def __init__(self, tokens: Tokens, seq_len: int) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.count = (len(tokens) - 1) // seq_len
        if self.count < 1:
            raise DataError(f"{len(tokens)} tokens of text are too few for one sequence of {seq_len}: add --data")

    def shuffled(self, first: int, count: int, seed: int) -> Tensor:
        """Windows first … first + count of the endless stream of epochs, each in an order of its own."""
        return self._read([self._permuted(index, seed) for index in range(first, first + count)])

    def spread(self, first: int, count: int, total: int) -> Tensor:
        """Windows first … first + count of ``total`` that are spread evenly over the text."""
        return self._read([index * self.count // total for index in range(first, first + count)])

    def _permuted(self, index: int, seed: int) -> int:
        epoch, position = divmod(index, self.count)
        if getattr(self, "_epoch", None) != (epoch, seed):
            self._epoch = (epoch, seed)
            self._order = np.random.default_rng((seed, epoch)).permutation(self.count)
        return int(self._order[position])

    def _read(self, windows: Sequence[int]) -> Tensor:
        starts = [window * self.seq_len for window in windows]
        rows = np.stack([self.tokens[start : start + self.seq_len + 1] for start in starts])
        return torch.from_numpy(rows.astype(np.int64))


def main() -> None:
    """Tokenize the text named on the command line, or the default one."""
    parser = argparse.ArgumentParser(description="Tokenize ahead of a run.")
    parser.add_argument("cache", type=Path, help="folder for the tokens")
    parser.add_argument("data", type=Path, nargs="*", help="text files or folders (default: Python's own sources)")
    parser.add_argument("--held-out", type=float, default=0.05, help="part of the files to measure on (default: 0.05)")
    parser.add_argument("--xz", action="store_true", help="compress the tokens")
    options = parser.parse_args()
    check_paths(options.data)
    corpus = load_corpus(options.data, options.held_out, options.cache, lambda done, total: None)
    print(f"{options.cache}: {len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} held out")
    if options.xz:
        compress(options.cache)


if __name__ == "__main__":
    main()
