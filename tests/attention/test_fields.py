"""What is wrong with an object is said by the field's path, what was given, and the limits."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.fields import Fields, parse, shown, whole


def refused(message, read, *args):
    with pytest.raises(ValueError) as told:  # noqa: PT011  the whole message is compared
        read(*args)
    assert str(told.value) == message


def test_an_object_has_its_fields_and_no_other():
    required, optional = ("a", "b"), ("c",)
    assert Fields.of({"b": 1, "a": 2}, required, optional).values == {"b": 1, "a": 2}
    assert Fields.of({"b": 1, "a": 2, "c": 3}, iter(required), optional).values["c"] == 3
    refused("b: is missing", Fields.of, {"a": 1, "c": 2}, required, optional)
    refused("d: no such field; there are a, b, c", Fields.of, {"a": 1, "b": 2, "d": 3}, required, optional)
    refused("there.d: no such field; there are a, b", Fields.of, {"a": 1, "b": 2, "d": 3}, required, (), "there")
    refused("the file: an object, got a list of 2", Fields.of, [1, 2], required)
    refused("there: an object, got null", Fields.of, None, required, (), "there")


def test_parts_are_told_by_their_path():
    whole_file = Fields.of({"outer": {"inner": {"n": 1}}, "flat": 3}, ("outer", "flat"))
    inner = whole_file.part("outer", ("inner",)).part("inner", ("n",), ("m",))
    assert inner.whole("n", 1, 1) == 1
    refused("outer.inner.n: a whole number from 2 to 3, got 1", inner.whole, "n", 2, 3)
    refused("flat: an object, got 3", whole_file.part, "flat", ("n",))
    refused("outer.other: is missing", whole_file.part, "outer", ("other",))
    refused("outer.inner: no such field; there are other, more", whole_file.part, "outer", (), ("other", "more"))


@pytest.mark.parametrize("length", [59, 60])
def test_a_name_is_told_as_it_is_unless_it_is_long(length):
    assert Fields({}, "x").at("n" * length) == "x." + "n" * length
    assert Fields({}).at("n" * length) == "n" * length


@pytest.mark.parametrize("length", [61, 1_000_000])
def test_a_long_name_is_cut(length):
    assert Fields({}, "x").at("n" * length) == "x." + "n" * 60 + "…"
    refused("n" * 60 + "…: no such field; there are a", Fields.of, {"a": 1, "n" * length: 2}, ("a",))


@pytest.mark.parametrize("given", [2, 3, 1000])
def test_whole_numbers_within_their_limits(given):
    assert whole(given, "x", 2, 1000) == given


@pytest.mark.parametrize(
    ("given", "told"),
    [(1, "1"), (1001, "1001"), (2.0, "2.0"), (True, "true"), ("2", '"2"'), (None, "null"), ([2], "a list of 1")],
)
def test_anything_else_is_no_whole_number(given, told):
    refused(f"x: a whole number from 2 to 1,000, got {told}", whole, given, "x", 2, 1000)


def test_lists_of_whole_numbers():
    def of(given):
        return Fields({"x": given}, "p").wholes("x", 1, 9, 1000)

    assert of([1]) == [1]
    assert of([1, 9] * 500) == [1, 9] * 500
    refused("p.x: a list of 1 to 1,000 whole numbers, got 0", of, [])
    refused("p.x: a list of 1 to 1,000 whole numbers, got 1001", of, [1] * 1001)
    refused("p.x: a list of 1 to 1,000 whole numbers, got an object of 1", of, {"1": 1})
    refused('p.x: a list of 1 to 1,000 whole numbers, got "12"', of, "12")
    refused("p.x[1]: a whole number from 1 to 9, got 10", of, [1, 10])


def test_lists_of_numbers():
    def of(given, count=2, least=-1.5, most=2.5):
        return Fields({"x": given}, "p").numbers("x", count, least, most)

    assert of([-1.5, 2.5]) == [-1.5, 2.5]
    read = of([1, 2])
    assert read == [1.0, 2.0]
    assert all(type(number) is float for number in read)
    refused("p.x: a list of 2 numbers, got 3", of, [1, 2, 3])
    refused("p.x: a list of 2 numbers, got 2.5", of, 2.5)
    for bad, told in ((-1.6, "-1.6"), (2.6, "2.6"), (math.nan, "NaN"), (True, "true"), ("1", '"1"'), (None, "null")):
        refused(f"p.x[1]: a finite number from -1.5 to 2.5, got {told}", of, [0, bad])
    assert of([0.0], 1, -math.inf, 1e300) == [0.0]
    refused("p.x[0]: a finite number, got NaN", of, [math.nan], 1, -math.inf, 1e300)
    refused("p.x[0]: a finite number, got Infinity", of, [math.inf], 1, -math.inf, 1e300)


def test_texts_that_say_something():
    assert Fields({"x": " a "}).text("x") == " a "
    for bad, told in (("", '""'), (" \n", '" \\n"'), (3, "3"), (None, "null"), (["a"], "a list of 1")):
        refused(f"p.x: a text that is not empty, got {told}", Fields({"x": bad}, "p").text, "x")


@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_is_shown_unless_it_has_more_than_thirty_digits(sign):
    assert shown(sign * (10**30 - 1)) == str(sign * (10**30 - 1))
    assert shown(sign * 10**30) == shown(sign * 10**5000) == "a number of more than 30 digits"


def test_a_long_value_is_cut():
    assert shown("a" * 38) == '"' + "a" * 38 + '"'
    assert shown("a" * 39) == '"' + "a" * 39 + "…"
    assert shown("a" * 10_000) == '"' + "a" * 39 + "…"
    assert (shown({}), shown([[1, 2], 3])) == ("an object of 0", "a list of 2")


def test_what_is_no_json_is_told_so():
    refused("no JSON: Expecting value: line 1 column 1 (char 0)", parse, "")
    refused("no JSON: nested too deep", parse, "[" * 1_000_000)
    refused("a number has too many digits", parse, "1" * 10_000)
    assert parse('{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=80), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_whatever_is_given_is_told_shortly_or_read(value):
    assert len(shown(value)) <= 41
    told = []
    for read in (
        lambda: Fields.of(value, ("a",), ("b",), "p"),
        lambda: Fields({"x": value}).text("x"),
        lambda: Fields({"x": value}).whole("x", -3, 3),
        lambda: Fields({"x": value}).wholes("x", -3, 3, 3),
        lambda: Fields({"x": value}).numbers("x", 2, -3.0, 3.0),
    ):
        try:
            read()
        except ValueError as error:
            told.append(str(error))
    assert all(len(message) < 200 for message in told)
    assert json.dumps(parse(json.dumps(value))) == json.dumps(value)
