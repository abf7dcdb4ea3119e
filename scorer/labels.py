"""Labels: texts that are one token each, or classes of a checkpoint's own head."""

from __future__ import annotations

from collections.abc import Sequence

from prefixrank.v1 import scorer_pb2 as pb
from scorer.encoder import Encoder, Part, shown
from scorer.errors import ProfileError
from scorer.profile import Profile
from scorer.tokenized import Label
from scorer.validation import SHOWN_CHARACTERS, Violations

FAR_TOO_LONG = 64  # tokens, of a label that is refused without being encoded


class Labels:
    """The labels of a profile, and those that a request brings instead.

    of_profile  the positive one first; empty for query likelihood
    """

    def __init__(
        self,
        encoder: Encoder,
        profile: Profile,
        item_end: Part,
        vocabulary_size: int,
        unknown: int | None,
        classes: Sequence[str],
    ) -> None:
        """classes: of the checkpoint's own head, by index; none where it has a language-model head.

        Raises ProfileError where a label of the profile is not one token, or none of the classes.
        """
        self._encoder = encoder
        self._profile = profile
        self._item_end = item_end
        self._vocabulary_size = vocabulary_size
        self._unknown = unknown
        self.of_profile = self._classes(classes) if profile.kind == "classification" else self._profile_labels()

    def of_request(self, options: pb.ScoreOptions, bad: Violations) -> tuple[Label, ...]:
        """The labels that a request is scored with."""
        texts, ids = options.label_texts, options.label_token_ids
        if not texts and not ids:
            return self.of_profile
        field = "options.label_texts" if texts else "options.label_token_ids"
        if self._profile.kind == "query_likelihood":
            bad.add(field, "absent: query likelihood reads the query, not labels")
            return ()
        if self._profile.kind == "classification":
            bad.add(field, "absent: the checkpoint's head has classes of its own")
            return ()
        if texts and ids:
            bad.add(field, "absent where options.label_token_ids are given", list(texts))
            return ()
        if len(texts or ids) > 2:
            bad.add(field, "one or two", len(texts or ids))
            return ()
        labels = self._labels_of_texts(texts, bad) if texts else self._labels_of_ids(ids, bad)
        if len(labels) == 2 and labels[0].token_id == labels[1].token_id:
            bad.add(f"{field}[1]", "a token other than the first label's", labels[1].token_id)
        return labels

    def _classes(self, names: Sequence[str]) -> tuple[Label, ...]:
        for text in self._profile.ordered_labels:
            if names.count(text) != 1:
                told = ", ".join(map(repr, names[:20]))
                raise ProfileError(f"profile {self._profile.name}: the checkpoint has no class {text!r}, but {told}")
        return tuple(Label(text, names.index(text)) for text in self._profile.ordered_labels)

    def _profile_labels(self) -> tuple[Label, ...]:
        made = []
        for text in self._profile.ordered_labels:
            token, complaint = self._label_token(text)
            if token is None:
                raise ProfileError(f"profile {self._profile.name}: label {text!r} {complaint}")
            made.append(Label(text, token))
        if len({label.token_id for label in made}) != len(made):
            raise ProfileError(f"profile {self._profile.name}: the labels are the same token {made[0].token_id}")
        return tuple(made)

    def _label_token(self, text: str) -> tuple[int | None, str]:
        """The one token that a label is, or what is wrong with it. Case and leading space tell labels apart.

        It is read as the text that goes on behind the item.
        """
        if (least := self._encoder.least_tokens(text)) > FAR_TOO_LONG:
            return None, f"must be exactly one token, it is at least {least}"
        ids = self._encoder.following_texts([text], self._item_end)[0]
        if len(ids) != 1:
            return None, f"must be exactly one token, it is {len(ids)}: {shown(ids)}"
        token = int(ids[0])
        if token in (self._encoder.unknown, self._unknown):
            return None, f"is not in the vocabulary: it is the unknown token {token}"
        if token >= self._vocabulary_size:
            return None, f"is token {token}, but the model has only {self._vocabulary_size}"
        return token, ""

    def _labels_of_texts(self, texts: Sequence[str], bad: Violations) -> tuple[Label, ...]:
        made = []
        for index, text in enumerate(texts):
            token, complaint = self._label_token(text)
            if token is None:
                bad.add(f"options.label_texts[{index}]", complaint, repr(text[:SHOWN_CHARACTERS]))
            else:
                made.append(Label(text, token))
        return tuple(made)

    def _labels_of_ids(self, ids: Sequence[int], bad: Violations) -> tuple[Label, ...]:
        for index, token in enumerate(ids):
            if token >= self._vocabulary_size:
                limit = f"below the vocabulary size {self._vocabulary_size}"
                bad.add(f"options.label_token_ids[{index}]", limit, token)
        bad.check()
        return tuple(Label(self._encoder.text_of(token), token) for token in ids)
