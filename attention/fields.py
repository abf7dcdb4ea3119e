"""A JSON object whose every field is checked before it is used: what is wrong is named by its path."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


def parse(text: str) -> Any:
    """Any JSON value. Raises ValueError, whatever the text is."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from None
    except RecursionError:
        raise ValueError("no JSON: nested too deep") from None
    except ValueError:  # Python reads no integer of more than some thousand digits
        raise ValueError("a number has too many digits") from None


@dataclass(frozen=True, slots=True)
class Fields:
    """An object with the fields that it must have, and no other. All methods raise ValueError with a field's path."""

    values: Mapping[str, Any]
    path: str = ""

    @classmethod
    def of(cls, given: Any, required: Iterable[str], optional: Collection[str] = (), path: str = "") -> Fields:
        """`given`, where it is an object with all required fields, perhaps optional ones, and no other."""
        if not isinstance(given, dict):
            raise ValueError(f"{path or 'the file'}: an object, got {shown(given)}")
        fields, required = cls(given, path), list(required)
        for name in required:
            if name not in given:
                raise ValueError(f"{fields.at(name)}: is missing")
        for name in given:
            if name not in required and name not in optional:
                raise ValueError(f"{fields.at(name)}: no such field; there are {', '.join([*required, *optional])}")
        return fields

    def at(self, name: str) -> str:
        """The path of a field."""
        short = name if len(name) <= 60 else name[:60] + "…"
        return f"{self.path}.{short}" if self.path else short

    def part(self, name: str, required: Iterable[str], optional: Collection[str] = ()) -> Fields:
        """A field that is such an object itself."""
        return Fields.of(self.values[name], required, optional, self.at(name))

    def text(self, name: str) -> str:
        """A field that is a text and says something."""
        given = self.values[name]
        if not isinstance(given, str) or not given.strip():
            raise ValueError(f"{self.at(name)}: a text that is not empty, got {shown(given)}")
        return given

    def whole(self, name: str, least: int, most: int) -> int:
        """A field that is a whole number between these."""
        return whole(self.values[name], self.at(name), least, most)

    def wholes(self, name: str, least: int, most: int, longest: int) -> list[int]:
        """A field that is a list of 1 to `longest` whole numbers between these."""
        given = self.values[name]
        if not isinstance(given, list) or not 1 <= len(given) <= longest:
            got = f"{len(given)}" if isinstance(given, list) else shown(given)
            raise ValueError(f"{self.at(name)}: a list of 1 to {longest:,} whole numbers, got {got}")
        return [whole(value, f"{self.at(name)}[{i}]", least, most) for i, value in enumerate(given)]

    def numbers(self, name: str, count: int, least: float, most: float) -> list[float]:
        """A field that is a list of so many finite numbers between these."""
        given = self.values[name]
        if not isinstance(given, list) or len(given) != count:
            got = f"{len(given)}" if isinstance(given, list) else shown(given)
            raise ValueError(f"{self.at(name)}: a list of {count} numbers, got {got}")
        return [_number(value, f"{self.at(name)}[{i}]", least, most) for i, value in enumerate(given)]


def whole(given: Any, path: str, least: int, most: int) -> int:
    """A whole number between these; 1.0 and true are none."""
    if type(given) is not int or not least <= given <= most:
        raise ValueError(f"{path}: a whole number from {least:,} to {most:,}, got {shown(given)}")
    return given


def _number(given: Any, path: str, least: float, most: float) -> float:
    if type(given) not in (int, float) or not least <= given <= most:  # NaN is in no order
        within = f" from {least:g} to {most:g}" if math.isfinite(least) else ""
        raise ValueError(f"{path}: a finite number{within}, got {shown(given)}")
    return float(given)


def shown(given: Any) -> str:
    """What was given, as far as it helps: a long value is cut, a deep one told by its kind."""
    if isinstance(given, dict | list):
        return f"an object of {len(given)}" if isinstance(given, dict) else f"a list of {len(given)}"
    if isinstance(given, int) and not isinstance(given, bool) and abs(given) >= 10**30:
        return "a number of more than 30 digits"
    told = json.dumps(given)
    return told if len(told) <= 40 else told[:40] + "…"
