# SPDX-License-Identifier: Apache-2.0
"""The Python source of whatever is installed, as tokens to learn from.

Each file of each installed distribution and of the standard library is a document. Files with equal
bytes count once. One folder in 32, by a hash of its name, is held out: files beside each other are
often alike, so they go one way together. The tokenizer is a byte-level BPE, trained here on every
8th file: it takes seconds, and a token stands for some four bytes.
"""

import hashlib
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

HELD_OUT = 32  # one folder in so many
SAMPLE = 8  # the tokenizer reads one file in so many
LIBRARY = Path(sysconfig.get_paths()["stdlib"])
END = "<|end|>"  # token 0, after each document


class Corpus(NamedTuple):
    """Tokens of both parts, and where they come from."""

    training: Tensor
    """[n] int16."""
    held_out: Tensor
    """[m] int16."""
    ends_line: Tensor
    """[vocabulary] bool: tokens with a line feed."""
    digest: str
    """Of all tokens."""
    about: list[str]
    """Sizes, and packages with their versions."""


class Document(NamedTuple):
    """A file of a distribution."""

    package: str
    is_held_out: bool
    text: str


def corpus(vocabulary: int, limit: int | None = None) -> Corpus:
    """The tokens of all files, or of the first files with so many bytes in all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    documents = list(distinct(limit))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d.text for d in documents[::SAMPLE]), trainer)
    training, held_out = ([d for d in documents if d.is_held_out == out] for out in (False, True))
    ends_line = torch.tensor(["\n" in tokenizer.decode([i]) for i in range(vocabulary)])
    parts = [tokens_of(part, tokenizer) for part in (training, held_out)]
    digest = hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()[:12]
    return Corpus(*parts, ends_line, digest, about(documents, parts, digest))


def distinct(limit: int | None) -> Iterator[Document]:
    """Documents, each text once, in the order of folders' hashes: any first part is a fair one."""
    folders: dict[bytes, list[tuple[str, str, Path]]] = {}
    for file in files():
        folders.setdefault(hash_of(*file[:2]), []).append(file)
    seen, total = set(), 0
    for i, folder in enumerate(sorted(folders)):
        for package, _, path in folders[folder]:
            try:
                text = path.read_text("utf-8")
            except (OSError, UnicodeDecodeError):
                continue  # recorded and not there, or in another encoding
            digest = hashlib.sha256(text.encode()).digest()
            if text and digest not in seen:
                seen.add(digest)
                total += len(text)
                yield Document(package, i % HELD_OUT == 0, text)
        if limit is not None and total >= limit:
            return


def files() -> Iterator[tuple[str, str, Path]]:
    """Package and version, name in it, and path of every Python file."""
    version = ".".join(map(str, sys.version_info[:3]))
    for path in of_the_library():
        yield f"Python {version}", str(path.relative_to(LIBRARY)), path
    found: dict[str, Any] = {}  # of two versions of a package the first is imported
    for distribution in metadata.distributions():
        found.setdefault(distribution.metadata["Name"], distribution)
    for name in sorted(found, key=str.lower):
        if name == "grouped_linear":
            continue  # changes with each commit
        package = f"{name} {found[name].version}"
        for file in sorted(found[name].files or [], key=str):
            if file.suffix == ".py":
                yield package, str(file), Path(str(file.locate()))


def of_the_library() -> list[Path]:
    """Python's own files, in a fixed order."""
    installed = {"site-packages", "dist-packages"}
    return [p for p in sorted(LIBRARY.rglob("*.py")) if installed.isdisjoint(p.parts)]


def hash_of(package: str, name: str) -> bytes:
    """Of a file's folder, without the package's version."""
    folder = f"{package.split()[0]}/{Path(name).parent}"
    return hashlib.sha256(folder.encode()).digest()


def tokens_of(documents: list[Document], tokenizer: Any, batch: int = 2048) -> Tensor:
    parts = [np.zeros(0, np.int16)]
    for first in range(0, len(documents), batch):
        texts = [d.text for d in documents[first : first + batch]]
        for encoding in tokenizer.encode_batch_fast(texts):
            parts.append(np.array([*encoding.ids, 0], np.int16))
    return torch.from_numpy(np.concatenate(parts))


def about(documents: list[Document], parts: list[Tensor], digest: str) -> list[str]:
    sizes = Counter[str]()
    for document in documents:
        sizes[document.package] += len(document.text)
    total = sizes.total()
    large = [f"{name} ({size / total:.0%})" for name, size in sizes.most_common(24)]
    training, held_out = (f"{len(part) / 1e6:.2f} M" for part in parts)
    return [
        f"corpus {digest}: Python source, {len(documents):,} files, {total / 1e6:.0f} M "
        f"characters; {training} tokens to learn from, {held_out} held out",
        f"corpus {digest} is of {len(sizes)} packages, the largest: {', '.join(large)}",
    ]
