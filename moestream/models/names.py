"""References to models on a hub, and which of a repository's files are one model. Pure: nothing is read or asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from moestream.errors import MoestreamError
from moestream.gguf_facts import SPLIT_NAME

PREFIX = "hf:"
# What is taken of several when none is named: the common compromise of size and quality first, then its neighbours.
PREFERRED = ("Q4_K_M", "UD-Q4_K_XL", "Q4_K_S", "IQ4_XS", "Q4_0", "MXFP4", "MXFP4_MOE", "Q5_K_M", "Q6_K", "Q8_0")
UNSLOTH = "UD-"  # what Unsloth puts before its own mixes

# As the hub's own rules for names; they become folders here.
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_QUANT = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q\d(?:_(?:0|1|4|8|K|NL|KSS|KS|KL|KT|XXS|XS|S|M|L|XL|XXL))*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|B?F16|F32))"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_MAX_PART_BYTES = 180  # of a file's name; 255 is what file systems take, and an unfinished download has a longer one
_SHOWN = 30  # of the models in an error


@dataclass(frozen=True)
class Reference:
    """``hf:OWNER/REPO[:LABEL]``; the label says which of the repository's models."""

    owner: str
    repo: str
    label: str | None = None

    @property
    def repo_id(self) -> str:
        return f"{self.owner}/{self.repo}"

    def __str__(self) -> str:
        return self.repo_id + (f":{self.label}" if self.label else "")


def parse(text: str) -> Reference:
    """Read a reference; ``hf:`` may be left out.

    Raises:
        MoestreamError: it is none.
    """
    repo_id, colon, label = text.removeprefix(PREFIX).partition(":")
    owner, _, repo = repo_id.partition("/")
    good = all(_NAME.fullmatch(part) and ".." not in part and "--" not in part for part in (owner, repo))
    if not good or (colon and not label) or label != printable(label):
        raise MoestreamError(
            f"{printable(text)}: not a model on a hub",
            hint="write hf:OWNER/REPO or hf:OWNER/REPO:QUANT, for example hf:ggml-org/gpt-oss-20b-GGUF",
        )
    return Reference(owner, repo, label or None)


def printable(text: str, limit: int = 200) -> str:
    """Text from elsewhere as a terminal may have it."""
    text = "".join(c if c.isprintable() else "�" for c in text[: limit + 1])
    return text if len(text) <= limit else text[:limit] + "…"


def check_path(path: str) -> None:
    """Refuse a file's path in a repository that would not lie below the folder it is put into, or that no folder can hold.

    Raises:
        MoestreamError: says so.
    """
    parts = path.split("/")
    inside = all(part not in ("", ".", "..") and "\\" not in part for part in parts) and not re.match(r"[A-Za-z]:", path)
    if not inside or path != printable(path, 4096):
        raise MoestreamError(
            f"the repository names a file '{printable(path)}', which may lie outside of the folder for it",
            hint="nothing was downloaded; do not trust this repository",
        )
    if any(len(part.encode()) > _MAX_PART_BYTES for part in parts):
        raise MoestreamError(f"the name of the file '{printable(path)}' is too long", hint="download it by hand")


def quant_of(path: str) -> str:
    """The quant that a file's name tells, upper case, for example ``Q4_K_M`` or ``UD-Q4_K_XL``; empty when it tells none."""
    for part in reversed(path.split("/")):
        stem = part.removesuffix(".gguf")
        if found := _QUANT.findall(stem):
            return str(found[-1]).upper()
    return ""


@dataclass(frozen=True)
class Candidate:
    """One model of a repository.

    Attributes:
        stem: its path without the number of a shard and ``.gguf``.
        quant: upper case, empty where the name tells none.
        files: paths in the repository, all shards in order, also those that are missing there.
        missing: those of ``files`` that are not in the repository.
        label: what names it in this repository: the quant, or the stem where that is not enough.
    """

    stem: str
    quant: str
    files: tuple[str, ...]
    missing: tuple[str, ...] = ()
    label: str = ""


def candidates(paths: Iterable[str]) -> list[Candidate]:
    """The models among the files of a repository; projectors (mmproj), importance matrices and vocabularies are none."""
    there = set(paths)
    found: dict[tuple[str, int], Candidate] = {}
    for path in sorted(there):
        folder, slash, name = path.rpartition("/")
        if not name.endswith(".gguf") or _is_other(name):
            continue
        split = SPLIT_NAME.fullmatch(name)
        stem = folder + slash + (split[1] if split else name.removesuffix(".gguf"))
        n_shard = int(split[3]) if split else 1
        if not split or not 1 <= int(split[2]) <= n_shard:
            found[stem, 0] = Candidate(stem, quant_of(f"{stem}.gguf"), (path,))
            continue
        files = tuple(f"{stem}-{i:05d}-of-{n_shard:05d}.gguf" for i in range(1, n_shard + 1))
        missing = tuple(file for file in files if file not in there)
        found[stem, n_shard] = Candidate(stem, quant_of(f"{stem}.gguf"), files, missing)
    models = list(found.values())
    quants = [model.quant for model in models]
    return [replace(m, label=m.quant if m.quant and quants.count(m.quant) == 1 else m.stem) for m in models]


def _is_other(name: str) -> bool:
    name = name.lower()
    return "mmproj" in name or name.startswith("ggml-vocab") or ("imatrix" in name and not quant_of(name))


def matching(label: str, models: Sequence[Candidate]) -> list[Candidate]:
    """The models that a label names, case ignored: by label, by quant, by file name, or by quant with ``UD-`` before it."""
    wanted = label.casefold()
    stem = wanted.removesuffix(".gguf")
    ways = (
        lambda m: m.label.casefold() == wanted,
        lambda m: m.quant.casefold() == wanted,
        lambda m: stem in (m.stem.casefold(), m.stem.rpartition("/")[2].casefold()),
        lambda m: any(wanted in (f.casefold(), f.rpartition("/")[2].casefold()) for f in m.files),
        lambda m: m.quant.casefold() == UNSLOTH.casefold() + wanted,
    )
    for way in ways:
        if found := [model for model in models if way(model)]:
            return found
    return []


def choose(
    reference: Reference, models: Sequence[Candidate], size_bytes: Mapping[str, int], shown_size: Callable[[int], str] = str
) -> Candidate:
    """The model that a reference names, or without a label the only one, or the first there is of ``PREFERRED``.

    Args:
        models: of the repository.
        size_bytes: of each file there.
        shown_size: how a size is written in errors.

    Raises:
        MoestreamError: there is none, or more than one, or it lacks a shard; lists what there is.
    """
    if not models:
        raise MoestreamError(
            f"{reference.repo_id} has no GGUF model",
            hint="look for a repository with GGUF files; their names mostly end in -GGUF",
        )

    def listed(some: Sequence[Candidate]) -> str:
        parts = [
            f"{printable(m.label)} ({shown_size(sum(size_bytes.get(f, 0) for f in m.files))}"
            f"{', lacks a shard' if m.missing else ''})"
            for m in some[:_SHOWN]
        ]
        return ", ".join(parts) + (f" and {len(some) - _SHOWN} more" if len(some) > _SHOWN else "")

    def example(some: Sequence[Candidate]) -> str:
        return f"name one of them: moestream pull {PREFIX}{reference.repo_id}:{printable(some[0].label)}"

    if reference.label is not None:
        found = matching(reference.label, models)
        if not found:
            raise MoestreamError(
                f"{reference.repo_id} has no model '{printable(reference.label)}'; it has {listed(models)}",
                hint=example(models),
            )
    else:
        found = list(models) if len(models) == 1 else []
        for quant in PREFERRED:
            found = found or [model for model in models if model.quant == quant]
    if not found:
        raise MoestreamError(
            f"{reference.repo_id} has several models, and none that would be the usual choice: {listed(models)}",
            hint=example(models),
        )
    if len(found) > 1:
        raise MoestreamError(f"'{reference}' may be any of several models: {listed(found)}", hint=example(found))
    if found[0].missing:
        lost = found[0].missing
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise MoestreamError(
            f"{reference.repo_id} lacks shard {printable(lost[0])}{more} of the {len(found[0].files)} of {printable(found[0].label)}",
            hint="it may still be on its way up; try again later, or choose another quant",
        )
    return found[0]
