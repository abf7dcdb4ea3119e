"""Seeded damage: bytes, wire messages, TOML and JSON that are almost right."""

import json
import random

from prefixrank.v1 import scorer_pb2 as pb

TEXTS = ("", " ", "Paris", "a\0b", "\u200b", "<|im_start|>", "🙂" * 9, "word " * 40, "\ufeffx", "%s{}\r\n", "a\n\n")
HALVES = ("\ud800", "a\udfff", "\udc00\ud800b")  # of surrogate pairs: JSON can write them, UTF-8 and protobuf cannot
NUMBERS = (0, 1, 2, 7, 511, 512, 2**31 - 1, 2**31, 2**32 - 1)


class Mutator:
    """Everything drawn from one seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def damaged(self, data):
        """A few bytes flipped, cut out, doubled or put in."""
        data = bytearray(data)
        for _ in range(self.random.randint(1, 4)):
            at = self.random.randint(0, len(data))
            match self.random.randrange(4):
                case 0 if data:
                    data[at % len(data)] ^= 1 << self.random.randrange(8)
                case 1:
                    del data[at : at + self.random.randint(1, 8)]
                case 2:
                    data[at:at] = data[at : at + self.random.randint(1, 16)]
                case _:
                    data[at:at] = self.random.randbytes(self.random.randint(1, 8))
        return bytes(data)

    def text(self):
        return self.random.choice(TEXTS) if self.random.random() < 0.8 else self._any_text()

    def _any_text(self):
        points = (self.random.choice((128, 0x3000, 0x10FFFF)) for _ in range(self.random.randint(0, 30)))
        return "".join(chr(self.random.randrange(most)) for most in points).encode("utf-8", "ignore").decode()

    def json_text(self):
        """A text as JSON may have it."""
        return self.random.choice(HALVES) if self.random.random() < 0.1 else self.text()

    def number(self):
        return self.random.choice(NUMBERS)

    def request(self):
        """A request whose fields are each right, wrong or absent."""
        asked = pb.ScoreRequest(request_id=self.text(), tenant=self.text())
        match self.random.randrange(4):
            case 0:
                asked.raw_text = self.text()
            case 1:
                asked.token_ids.ids.extend(self.number() for _ in range(self.random.randint(0, 4)))
            case 2:
                asked.query.text = self.text()
                if self.random.random() < 0.3:
                    asked.query.instruction = self.text()
        for _ in range(self.random.randint(0, 4)):
            document = asked.documents.add(id=self.random.choice(("", "", "a", self.text())))
            match self.random.randrange(4):
                case 0:
                    document.raw_text = self.text()
                case 1:
                    document.token_ids.ids.extend(self.number() for _ in range(self.random.randint(0, 4)))
                case 2:
                    document.text = self.text()
            if self.random.random() < 0.1:
                document.target_tokens = self.number()
        options = asked.options
        if self.random.random() < 0.3:
            options.strategy = self.random.randint(0, 12)
            options.truncation = self.random.randint(0, 4)
            options.max_tokens_per_document = self.number()
            options.top_n = self.number()
        if self.random.random() < 0.2:
            options.label_texts.extend(self.text() for _ in range(self.random.randint(0, 3)))
            options.label_token_ids.extend(self.number() for _ in range(self.random.randint(0, 3)))
        if self.random.random() < 0.2:
            options.outputs.label_logits = options.outputs.vocabulary_probabilities = True
        return asked

    def wire(self):
        """Bytes of a message, damaged half of the time."""
        data = self.request().SerializeToString()
        return self.damaged(data) if self.random.random() < 0.5 else data

    def value(self, depth=0):
        """Any JSON value."""
        kind = self.random.randrange(8 if depth < 3 else 6)
        if kind == 6:
            return [self.value(depth + 1) for _ in range(self.random.randint(0, 3))]
        if kind == 7:
            return {self.json_text(): self.value(depth + 1) for _ in range(self.random.randint(0, 2))}
        return (None, True, self.number(), -1.5, self.json_text(), float("inf"))[kind]

    def with_another_text(self, value):
        """A JSON value of the same form, with other texts here and there."""
        if isinstance(value, list):
            return [self.with_another_text(each) for each in value]
        if isinstance(value, dict):
            return {key: self.with_another_text(each) for key, each in value.items()}
        return self.json_text() if isinstance(value, str) and self.random.random() < 0.5 else value

    def body(self, good):
        """A JSON body: some fields replaced, left out or added, and sometimes damaged as text."""
        made = dict(good)
        for _ in range(self.random.randint(0, 3)):
            key = self.random.choice([*good, self.json_text()])
            if self.random.random() < 0.3:
                made.pop(key, None)
            elif self.random.random() < 0.5:
                made[key] = self.value()
            else:
                made[key] = self.with_another_text(made.get(key, ""))
        data = json.dumps(made).encode()
        return self.damaged(data) if self.random.random() < 0.3 else data
