import os

import pytest

from scorer.access import ANYONE, Access, Caller, TokenFile, parse_tokens
from scorer.errors import ConfigError, Forbidden, RateLimited, Unauthenticated
from scorer.rate import TokenBucket

FIRST, SECOND = "first-token-0123456789", "second-token-0123456789"


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"# tokens of the shop\n\n{FIRST}\n{SECOND} shop\n")
    return path


def bearer(token):
    return f"Bearer {token}"


def test_each_token_is_somebody_and_nothing_else_is(path):
    access = Access(TokenFile(path))
    assert access.caller(bearer(FIRST)).tenant is None
    assert access.caller(f"bearer  {SECOND} ").tenant == "shop"
    assert access.caller(bearer(FIRST)).name != access.caller(bearer(SECOND)).name
    assert FIRST[:8] not in access.caller(bearer(FIRST)).name
    for wrong in (None, "", FIRST, f"Basic {FIRST}", bearer(FIRST + "x"), bearer(FIRST[:-1]), bearer(""), b"\xff"):
        with pytest.raises(Unauthenticated):
            access.caller(wrong)


def test_without_tokens_everyone_may_call():
    assert Access().open
    assert Access().caller(None) == ANYONE


def test_a_token_counts_for_its_tenant_only():
    assert Caller("t", "shop").tenant_of("") == "shop"
    assert Caller("t", "shop").tenant_of("shop") == "shop"
    assert Caller("t").tenant_of("any") == "any"
    with pytest.raises(Forbidden, match="another tenant"):
        Caller("t", "shop").tenant_of("bank")


def test_tokens_are_rotated_without_a_restart(path):
    clock = Clock()
    access = Access(TokenFile(path, clock))
    path.write_text(f"{SECOND}\n")
    access.caller(bearer(FIRST))  # looked less than a second ago
    clock.now += 1
    with pytest.raises(Unauthenticated):
        access.caller(bearer(FIRST))
    assert access.caller(bearer(SECOND)).tenant is None


@pytest.mark.parametrize("damage", ["", "short", "gone"])
def test_a_damaged_file_leaves_the_tokens_as_they_were(path, damage, caplog):
    clock = Clock()
    access = Access(TokenFile(path, clock))
    os.unlink(path) if damage == "gone" else path.write_text(damage)
    clock.now += 2
    access.caller(bearer(FIRST))
    assert "the tokens stay as they were" in caplog.text
    assert FIRST not in caplog.text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "between 1 and 1000 tokens, got 0"),
        ("too-short", "line 1: a token has at least 16"),
        (f"\n{FIRST} a b", "line 2: TOKEN or TOKEN TENANT, got 3 words"),
        ("ümläut-0123456789-0123", "16 ASCII"),
        ("\n".join(f"{i:020}" for i in range(1001)), "got 1001"),
    ],
)
def test_a_malformed_file_stops_the_start_and_shows_no_token(tmp_path, text, told):
    path = tmp_path / "tokens"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=told) as caught:
        TokenFile(path)
    assert FIRST not in str(caught.value)


def test_a_missing_file_stops_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"auth_tokens_file .*nowhere"):
        TokenFile(tmp_path / "nowhere")


def test_equal_tokens_of_two_lines_are_one():
    assert len(parse_tokens(f"{FIRST}\n{FIRST} shop")) == 1


def test_the_rate_is_each_callers_own(path):
    clock = Clock()
    access = Access(TokenFile(path), 2.0, clock)
    first, second = access.caller(bearer(FIRST)), access.caller(bearer(SECOND))
    access.count(first)
    access.count(first)
    with pytest.raises(RateLimited, match="max_requests_per_second = 2"):
        access.count(first)
    access.count(second)
    clock.now += 0.5
    access.count(first)
    with pytest.raises(RateLimited):
        access.count(first)


def test_without_a_rate_nothing_is_counted():
    access = Access()
    for _ in range(1000):
        access.count(ANYONE)


def test_a_bucket_saves_up_no_more_than_its_burst():
    bucket = TokenBucket(10, 3, 0.0)
    assert [bucket.take(1000.0) for _ in range(4)] == [True, True, True, False]
    assert [bucket.take(1000.1), bucket.take(1000.1)] == [True, False]
