"""Profiles: what turns a query and a document into the tokens a checkpoint judges, and which of its answers to read.

A profile is a small TOML file. Built-in ones lie in `scorer/profiles/`; `load_profile` takes a name or a path.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from scorer.errors import ProfileError

QUERY = "{query}"
DOCUMENT = "{document}"
INSTRUCTION = "{instruction}"
SEAM = "{seam}"

_PLACEHOLDER = re.compile(r"\{[A-Za-z_]\w*\}")
_NOT_IN_REVISION = {"name", "description", "labels", "positive", "golden", "golden_tolerance"}


class Golden(BaseModel):
    """A query, a document and the score that the checkpoint gave them: log-odds, logit or mean log-probability."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    query: str = Field(min_length=1)
    document: str = Field(min_length=1)
    score: float = Field(allow_inf_nan=False)


class ProfileLimits(BaseModel):
    """Token counts. A request's max_tokens_per_document lies between 1 and max_tokens_per_document."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_query_tokens: int = Field(default=512, ge=1)
    default_tokens_per_document: int = Field(default=512, ge=1)
    max_tokens_per_document: int = Field(default=4096, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.default_tokens_per_document > self.max_tokens_per_document:
            raise ValueError("default_tokens_per_document exceeds max_tokens_per_document")
        return self


class Profile(BaseModel):
    """Everything beside the weights that decides a score.

    kind            label_logits reads the labels' logits at the item's last token; query_likelihood reads the query's
                    tokens at the end of the item; classification reads classes of the checkpoint's own head
    format          text: `prefix` and `item` are the exact text, control tokens written out; chat: they are the content
                    of the user's message, `system` that of the system's, inside the tokenizer's own chat template
    prefix          has {query}; may have {instruction}. query_likelihood: has no {query}
    item            has {document} once; query_likelihood: and ends with {query}
    instruction     the default for {instruction}
    listwise        a document sees those before it, and its score depends on them and their order: for checkpoints that
                    were trained on whole lists
    labels          one or two texts, each one token; `positive` is one of them. classification: names of classes as the
                    checkpoint's id2label has them
    golden          scores that the checkpoint must reproduce within golden_tolerance at every start

    {seam} writes nothing: the text on its two sides is encoded apart, as a checkpoint's published code may do.
    Placeholders are found by plain search. Other braces are text, and placeholders in a user's text are text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    description: str = ""
    kind: Literal["label_logits", "query_likelihood", "classification"]
    format: Literal["text", "chat"] = "text"
    system: str | None = None
    prefix: str = Field(min_length=1)
    item: str = Field(min_length=1)
    instruction: str | None = None
    listwise: bool = False
    labels: tuple[str, ...] = ()
    positive: str | None = None
    limits: ProfileLimits = ProfileLimits()
    golden_tolerance: float = Field(default=0.02, gt=0, allow_inf_nan=False)
    golden: tuple[Golden, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        complaints = [*self._template_complaints(), *self._label_complaints()]
        if complaints:
            raise ValueError("; ".join(complaints))
        return self

    def _template_complaints(self) -> Iterator[str]:
        reads_query = self.kind == "query_likelihood"
        known = {
            "prefix": {INSTRUCTION, SEAM} if reads_query else {INSTRUCTION, QUERY, SEAM},
            "item": {DOCUMENT, QUERY, SEAM} if reads_query else {DOCUMENT, SEAM},
            "system": set(),
        }
        for field, allowed in known.items():
            for placeholder in sorted(set(_PLACEHOLDER.findall(getattr(self, field) or "")) - allowed):
                yield f"{field}: {placeholder} has no place there; known are {', '.join(sorted(allowed)) or 'none'}"
        for field in ("prefix", "item"):
            if getattr(self, field).endswith(SEAM):
                yield f"{field}: {SEAM} stands before the text that is encoded apart, not at the end"
        if self.item.count(DOCUMENT) != 1:
            yield f"item: {DOCUMENT} must occur exactly once"
        if reads_query and not (self.item.endswith(QUERY) and self.item.count(QUERY) == 1):
            yield f"item: must end with {QUERY}, and have it once: it is what the model is asked to predict"
        if not reads_query and QUERY not in self.prefix:
            yield f"prefix: {QUERY} is missing"
        if (INSTRUCTION in self.prefix) != (self.instruction is not None):
            yield f"instruction: goes with {INSTRUCTION} in the prefix, neither without the other"
        if self.system is not None and self.format != "chat":
            yield "system: only format = 'chat' has one; write it into the prefix"
        if reads_query and self.listwise:
            yield "listwise: query_likelihood reads the query behind one document, which cannot see others"
        if self.listwise and self.format == "chat":
            yield "listwise: a chat template would close the user's message behind each document; use 'text'"
        if reads_query and self.format == "chat":
            yield "format: query_likelihood ends with the query, which a chat template would close; use 'text'"

    def _label_complaints(self) -> Iterator[str]:
        if self.kind == "query_likelihood":
            if self.labels or self.positive is not None:
                yield "labels: query_likelihood reads the query, it has no labels"
            return
        if not 1 <= len(self.labels) <= 2:
            what = "names of classes" if self.kind == "classification" else "texts, each one token of the tokenizer"
            yield f"labels: one or two {what}"
        if len(set(self.labels)) != len(self.labels):
            yield "labels: the two are equal"
        if "" in self.labels:
            yield "labels: an empty text is no label"
        if self.positive not in self.labels:
            yield "positive: must be one of labels"

    @property
    def ordered_labels(self) -> tuple[str, ...]:
        """The labels, the positive one first; empty for query_likelihood."""
        return tuple(sorted(self.labels, key=lambda label: label != self.positive))

    @property
    def revision(self) -> str:
        """Twelve hex digits that change with everything in the profile that can change a score."""
        scored = self.model_dump(exclude=_NOT_IN_REVISION) | {"labels": self.ordered_labels}
        if not self.listwise:  # revisions are older than this field
            del scored["listwise"]
        return hashlib.sha256(json.dumps(scored, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def verified(self) -> bool:
        """Whether the profile was ever run on its checkpoint."""
        return bool(self.golden)


def builtin_names() -> tuple[str, ...]:
    """The names of the profiles that come with the package."""
    files = resources.files("scorer").joinpath("profiles").iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def load_profile(name_or_path: str | Path) -> Profile:
    """The built-in profile of that name, or the one in that TOML file.

    Raises ProfileError naming the file and each bad field.
    """
    name = str(name_or_path)
    if name in builtin_names():
        text = resources.files("scorer").joinpath("profiles", f"{name}.toml").read_text(encoding="utf-8")
        return _parse(text, f"built-in profile {name}")
    path = Path(name_or_path)
    if path.suffix != ".toml":
        raise ProfileError(
            f"no profile is called {name!r}; built in: {', '.join(builtin_names())}; or give a .toml file"
        )
    try:
        return _parse(path.read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"cannot read the profile {name}: {error}") from None


def record_golden(path: Path, profile: Profile, triples: Iterable[tuple[str, str, float]]) -> Profile:
    """Writes a copy of `profile` with these (query, document, score) triples as its golden scores; returns the copy."""
    golden = tuple(Golden(query=query, document=document, score=score) for query, document, score in triples)
    recorded = profile.model_copy(update={"golden": golden})
    text = _to_toml(recorded)
    assert _parse(text, str(path)) == recorded, "a written profile loads back equal"
    path.write_text(text, encoding="utf-8", newline="\n")
    return recorded


def _parse(text: str, source: str) -> Profile:
    try:
        return Profile.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"{source}: not TOML: {error}") from None
    except ValidationError as error:
        raise ProfileError("; ".join(f"{source}: {_complaint(e)}" for e in error.errors())) from None


def _complaint(error: Any) -> str:
    field = ".".join(str(part) for part in error["loc"])
    if not field:  # the profile as a whole: the message names the fields
        return str(error["msg"]).removeprefix("Value error, ")
    if error["type"] in ("missing", "value_error"):
        return f"{field}: {error['msg']}"
    return f"{field}: {error['msg']}, got {repr(error['input'])[:100]}"


def _to_toml(profile: Profile) -> str:
    fields = profile.model_dump(exclude_none=True)
    limits, golden = fields.pop("limits"), fields.pop("golden")
    lines = _assignments(fields)
    lines += ["", "[limits]", *_assignments(limits)]
    for triple in golden:
        lines += ["", "[[golden]]", *_assignments(triple)]
    return "\n".join(lines) + "\n"


def _assignments(fields: dict[str, Any]) -> list[str]:
    return [f"{key} = {_toml_value(value)}" for key, value in fields.items()]


def _toml_value(value: str | float | tuple[str, ...]) -> str:
    if isinstance(value, str):  # JSON's escapes are TOML's; only DEL is raw in the one and forbidden in the other
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(_toml_value(part) for part in value)}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)
