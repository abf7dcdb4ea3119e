"""From a request's text to token ids, under one profile; and the proof that they are exact.

Everything is tokenised once; the ids of the prefix and of each item are the same whether an item runs alone or packed.
Text of the profile may hold control tokens, text of a user never does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from attention.layout import ranges
from attention.plans import Strategy
from batching.items import Items
from batching.select import DENSE_TOKENS
from batching.types import Ints, TokenizedRequest
from prefixrank.v1 import scorer_pb2 as pb
from scorer.body import body_of
from scorer.config import Limits
from scorer.documents import Documents, Reads, Tail
from scorer.encoder import Encoder, Run, ints
from scorer.errors import ModelError, ProfileError
from scorer.labels import Labels
from scorer.profile import DOCUMENT, INSTRUCTION, QUERY, SEAM, Profile
from scorer.seams import AWKWARD_DOCUMENTS, AWKWARD_QUERIES, Apart, check_seams
from scorer.template import Slot, chat, filled, pieces, template_pieces
from scorer.tokenized import PRIORITIES, DocumentTokens, Label, Status, Tokenized
from scorer.truncation import Cutting
from scorer.validation import Violations, check_documents, check_options, check_prefix, short

__all__ = ["DocumentTokens", "Label", "Status", "Tokenization", "Tokenized", "load_tokenizer"]

_UNLIMITED = 1 << 30
_SEAM_MARK = "\ue000"  # stands for a seam in the texts of the proof, whose documents do not have it

_STRATEGIES = {
    number: Strategy(name.removeprefix("STRATEGY_").lower()) if number else None for name, number in pb.Strategy.items()
}


def load_tokenizer(source: str | Path, allow_download: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer of a checkpoint: a directory, a .gguf file or, if allowed, a repository of the hub.

    Raises ModelError.
    """
    path = Path(source)
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(source)}
    if path.is_file():
        place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**place, local_files_only=not allow_download, trust_remote_code=False)
    except Exception as error:  # what a damaged tokenizer raises is not ours to list
        raise ModelError(f"{source} has no tokenizer that transformers can load: {error!r}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        kind = type(tokenizer).__name__
        raise ModelError(f"the tokenizer of {source} is a {kind}; it needs one with a tokenizer.json")
    return tokenizer


class Tokenization:
    """Turns requests into ids under one profile. Threads may share it.

    labels  the profile's, the positive one first
    """

    labels: tuple[Label, ...]

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, profile: Profile, limits: Limits, classes: Sequence[str] = ()
    ) -> None:
        """classes: of the checkpoint's own head, where it has one.

        Raises ProfileError where the profile's templates or labels do not fit the tokenizer or the head.
        """
        self._tokenizer = tokenizer
        self._profile = profile
        self._limits = limits
        self._prefix_pieces, self._item_pieces = template_pieces(tokenizer, profile)
        written = [piece for piece in (*self._prefix_pieces, *self._item_pieces) if isinstance(piece, str)]
        self._encoder = Encoder(tokenizer, "\n".join(written))
        self._prefix = self._encoder.split(self._prefix_pieces)
        self._check_prefix_end()
        item = self._encoder.split(self._item_pieces, self._prefix[-1])
        self._body = body_of(self._encoder, item)
        self._documents = Documents(self._encoder, self._prefix[-1], self._body, limits.vocabulary_size)
        self._fixed_tail = None if profile.kind == "query_likelihood" else Tail(self._encoder.fixed(self._body.after))
        # SmolLM2's unknown token is <|endoftext|>, which its vocabulary never falls back to.
        unknown, size = tokenizer.unk_token_id, limits.vocabulary_size
        self._labels = Labels(self._encoder, profile, item[-1], size, unknown, classes)
        self.labels = self._labels.of_profile

    @cached_property
    def fingerprint(self) -> bytes:
        """Of the tokenizer and what the profile makes with it."""
        told = self._tokenizer.backend_tokenizer.to_str(), self._prefix_pieces, self._item_pieces, self.labels
        return blake2b(repr(told).encode(), digest_size=16).digest()

    def tokenize(self, request: pb.ScoreRequest) -> Tokenized:
        """The request in ids, and a verdict on each document. Raises InvalidRequest naming every bad field."""
        bad = Violations()
        given = check_documents(request, self._profile, self._limits, bad)
        check_prefix(request, self._profile, self._limits, bad)
        labels = self._labels.of_request(request.options, bad)
        check_options(request, self._profile, self._limits, bad)
        self._check_sizes(request, bad)
        bad.check()
        prefix = self._prefix_ids(request, bad)
        tail = self._tail(request.query.text, bad)
        bad.check()
        asked = request.options.max_tokens_per_document
        cutting = Cutting(asked or self._limits.default_tokens_per_document, request.options.truncation)
        room = self._limits.max_context_tokens - len(prefix)
        reads = self._documents.read(given, request.options, cutting, room, tail, bad)
        total = len(prefix) + len(reads.ids)
        if total > self._limits.max_request_tokens:
            bad.add("documents", f"at most {self._limits.max_request_tokens} tokens in all, prefix included", total)
        if self._profile.listwise and total > self._limits.max_context_tokens:
            most = self._limits.max_context_tokens
            bad.add("documents", f"at most {most} tokens in all, prefix included, as each is read behind others", total)
        bad.check()
        return self._assembled(request, given.ids, labels, prefix, reads)

    @property
    def item_end(self) -> int | None:
        """The last token of every item that is written by the template; None where the item ends with the query."""
        return None if self._fixed_tail is None else int(self._fixed_tail.ids[-1])

    def continuation(self, text: str) -> Ints | None:
        """A text as what may follow a prompt: no control tokens, no space of the tokenizer's own before it. None where
        it cannot be written so."""
        encoded = self._encoder.user_text(text, starts=False)
        return None if encoded.unwritable else encoded.ids

    def text(self, ids: Ints) -> str:
        """What these tokens write, without control tokens."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def prefix(self, request: pb.WarmPrefixRequest | pb.BeamSearchRequest) -> Ints:
        """The ids of a prefix alone. Raises InvalidRequest naming every bad field."""
        asked = pb.ScoreRequest(tenant=request.tenant)
        if (which := request.WhichOneof("prefix")) is not None:
            if which == "raw_text":
                asked.raw_text = request.raw_text
            else:
                getattr(asked, which).CopyFrom(getattr(request, which))
        bad = Violations()
        check_prefix(asked, self._profile, self._limits, bad)
        self._check_sizes(asked, bad)
        bad.check()
        ids = self._prefix_ids(asked, bad)
        bad.check()
        return ids

    def render(self, query: str, document: str, instruction: str | None = None) -> tuple[str, str]:
        """Prefix and item as text, control tokens written out: what a caller without this service would tokenize."""
        prefix, body, tail = self._texts(query, document, instruction)
        return prefix, body + tail

    def prove(self) -> None:
        """Shows on awkward texts that prefix and item, encoded apart, are the tokens of the two encoded together.

        Raises ProfileError naming the seam, the document and the ids.
        """
        documents = [d for d in AWKWARD_DOCUMENTS if not any(text in d for text in self._encoder.control_texts)]
        for query in AWKWARD_QUERIES:
            self._prove_chat(query)
            for apart in self._apart(query, documents):
                check_seams(self._profile.name, apart, self._plain_ids, self._tokenizer.backend_tokenizer.normalizer)

    def _check_prefix_end(self) -> None:
        """Whether the tokenizer puts a space before the item must not depend on a request."""
        last = self._prefix[-1]
        if isinstance(last, Run) and last.starts and not last.text({QUERY: "a query", INSTRUCTION: ""}):
            raise ProfileError(
                f"profile {self._profile.name}: the prefix ends with {INSTRUCTION}, which may be empty; the tokenizer "
                f"would then put a space before the item. Let text follow {INSTRUCTION}"
            )

    def _check_sizes(self, request: pb.ScoreRequest, bad: Violations) -> None:
        """Refuses at once what is too long however it is encoded: that would take seconds for nothing."""
        context = f"a prefix of fewer than {self._limits.max_context_tokens} tokens, which it shares with an item"
        most = self._limits.max_query_tokens
        for field, text, limit, too_many in (
            ("query.text", request.query.text, f"at most {most} tokens", most + 1),
            ("query.instruction", request.query.instruction, context, self._limits.max_context_tokens),
            ("raw_text", request.raw_text, context, self._limits.max_context_tokens),
        ):
            if (least := self._encoder.least_tokens(text)) >= too_many:
                bad.add(field, limit, f"at least {least} tokens in {len(text)} characters")

    def _prefix_ids(self, request: pb.ScoreRequest, bad: Violations) -> Ints:
        field = {"query": "query.text", "raw_text": "raw_text", "token_ids": "token_ids.ids"}
        which = request.WhichOneof("prefix")
        assert which is not None, "checked before"
        ids: Ints | None
        if which == "query":
            ids = self._query_prefix_ids(request.query, bad)
        elif which == "raw_text":
            ids = self._encoder.with_lead(self._encoder.profile_text(request.raw_text))
        else:
            ids = ints(request.token_ids.ids)
        if ids is None:
            bad.add(field[which], "text that can be written without a control token")
            return ints([])
        most = self._limits.max_context_tokens
        if len(ids) >= most:
            bad.add(field[which], f"a prefix of fewer than {most} tokens, which it shares with an item", len(ids))
        size = self._limits.vocabulary_size
        # Ids that were given have been looked at.
        if which != "token_ids" and ids.size and (highest := int(ids.max())) >= size:
            bad.add(field[which], f"token ids below the vocabulary size {size}", highest)
        return ids

    def _query_prefix_ids(self, query: pb.QueryPrefix, bad: Violations) -> Ints | None:
        tokens, most = len(self._encoder.user_text(query.text, starts=False).ids), self._limits.max_query_tokens
        if tokens > most:
            bad.add("query.text", f"at most {most} tokens", f"{tokens} tokens")
        ids = self._encoder.render(self._prefix, self._values(query.text, _instruction(query)))
        return None if ids is None else self._encoder.with_lead(ids)

    def _values(self, query: str, instruction: str | None) -> dict[str, str]:
        return {QUERY: query, INSTRUCTION: self._profile.instruction or "" if instruction is None else instruction}

    def _tail(self, query: str, bad: Violations) -> Tail:
        if self._fixed_tail is not None:
            return self._fixed_tail
        ids = self._encoder.render(self._body.after, {QUERY: query})
        if ids is None:
            bad.add("query.text", "text that can be written without a control token")
            return Tail(ints([]))
        last = self._body.after[-1]
        assert isinstance(last, Run), "the item of a query_likelihood profile ends with the query"
        encoded = self._encoder.user_text(last.text({QUERY: query}), last.starts)
        return Tail(ids, encoded.tokens_behind(len(last.text({QUERY: ""}))))

    def _assembled(
        self, request: pb.ScoreRequest, ids: Sequence[str], labels: tuple[Label, ...], prefix: Ints, reads: Reads
    ) -> Tokenized:
        statuses, messages, own, lengths, targets, tokens, originals, truncated = reads
        numbers = count()
        places = [next(numbers) if length else None for length in lengths]
        documents = tuple(map(DocumentTokens, ids, statuses, messages, lengths, tokens, originals, truncated, places))
        scored = ints([length for length in lengths if length])
        if any(targets):
            items = _predicted(
                own, scored, ints([target for target, place in zip(targets, places, strict=True) if place is not None])
            )
        else:
            items = Items.read_at_end(own, scored, ints([label.token_id for label in labels]))
        listwise = self._profile.listwise
        tokenized = TokenizedRequest(
            prefix=prefix,
            items=_chained(items) if listwise and items else items,
            normalize=self._profile.kind == "query_likelihood" or request.options.outputs.vocabulary_probabilities,
            strategy=_STRATEGIES[request.options.strategy],
            tenant=request.tenant,
            priority=PRIORITIES[request.priority],
            partial_ok=request.options.partial_ok,
        )
        if listwise and tokenized.strategy is None and tokenized.tokens <= DENSE_TOKENS:
            tokenized = replace(tokenized, strategy=Strategy.CUSTOM_MASK)
        return Tokenized(tokenized if items else None, documents, labels, len(prefix), listwise)

    def _texts(self, query: str, document: str, instruction: str | None = None, seam: str = "") -> tuple[str, str, str]:
        """The prefix, the item up to the end of the document, and what follows; `seam` where the template has one."""
        values = self._values(query, instruction) | {DOCUMENT: document, SEAM: seam}
        end = self._item_pieces.index(Slot(DOCUMENT)) + 1
        parts = (self._prefix_pieces, self._item_pieces[:end], self._item_pieces[end:])
        prefix, body, tail = (filled(part, values) for part in parts)
        return prefix, body, tail

    def _apart(self, query: str, documents: Sequence[str]) -> Iterator[Apart]:
        bad = Violations()
        prefix = self._query_prefix_ids(pb.QueryPrefix(text=query), bad)
        tail = self._tail(query, bad)
        assert prefix is not None, "the queries of the proof hold no control tokens"
        reads = self._documents.read_texts(documents, Cutting(_UNLIMITED, pb.TRUNCATION_NONE), _UNLIMITED, tail)
        for document, read in zip(documents, reads, strict=True):
            if read.ids is not None:
                texts = self._texts(query, document, seam=_SEAM_MARK)
                yield Apart(query, document, texts, (prefix, read.ids), len(tail.ids))

    def _plain_ids(self, text: str) -> Ints:
        """By the tokenizer itself, not by our copies of it."""
        parts = [self._tokenizer(part, add_special_tokens=False).input_ids for part in text.split(_SEAM_MARK) if part]
        return self._encoder.with_lead(ints([id_ for ids in parts for id_ in ids]))

    def _prove_chat(self, query: str) -> None:
        """A chat template may trim or rewrite what is put into it."""
        if self._profile.format != "chat":
            return
        document = "a document"
        values = self._values(query, None) | {DOCUMENT: document, SEAM: ""}
        content = filled((*pieces(self._profile.prefix), *pieces(self._profile.item)), values)
        if chat(self._tokenizer, self._profile, content) != "".join(self.render(query, document)):
            raise ProfileError(
                f"profile {self._profile.name}: the chat template changes the message {short(content)!r}"
            )


def _predicted(ids: Ints, lengths: Ints, targets: Ints) -> Items:
    """Reads each target, of an item's last tokens, at its predecessor; an item without any at its end, for nothing."""
    reads = np.maximum(targets, 1)
    offsets = ranges(lengths - targets - 1, reads)
    return Items(
        ids,
        lengths,
        reads,
        offsets,
        np.repeat(np.minimum(targets, 1), reads),
        ids[ranges(np.cumsum(lengths) - targets, targets)],
    )


def _chained(items: Items) -> Items:
    """All of them as one: each sees those before it, and is read where it ends."""
    return Items(
        items.ids,
        ints([len(items.ids)]),
        ints([len(items)]),
        np.cumsum(items.lengths, dtype=np.int32) - np.int32(1),
        items.widths,
        items.read_ids,
    )


def _instruction(query: pb.QueryPrefix) -> str | None:
    return query.instruction if query.HasField("instruction") else None
