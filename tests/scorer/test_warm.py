"""WarmPrefix of several tenants on a real server: what it answers is so."""

import pytest

from prefixrank.v1 import scorer_pb2 as pb
from tests.cases.live import PROFILE, live
from tests.tiny import tiny_model_dir


@pytest.fixture
def server(tmp_path):
    tiny_model_dir(tmp_path / "model")
    with live(tmp_path / "model", PROFILE, tmp_path, cache_tokens=512, page_size=16) as server:
        yield server


def warmed(server, number, tokens, tenant, ttl):
    request = pb.WarmPrefixRequest(token_ids=pb.TokenIds(ids=[number] * tokens), tenant=tenant, ttl_seconds=ttl)
    return server.runner.run(server.at.client.warm_prefix(request))


def push_out(server):
    """Another tenant's new prefixes, more than there are pages."""
    for number in range(60, 80):
        ids = [number] * 96
        document = pb.Document(token_ids=pb.TokenIds(ids=[5, 6]))
        server.send(pb.ScoreRequest(token_ids=pb.TokenIds(ids=ids), documents=[document], tenant="crowd"))


def test_a_tenant_that_pins_for_an_hour_leaves_others_their_part(server):
    assert warmed(server, 40, 256, "greedy", 3600).kept_tokens == 256
    assert [warmed(server, number, 128, "greedy", 3600).kept_tokens for number in (41, 42)] == [0, 0]
    other = warmed(server, 90, 112, "other", 30)
    assert (other.status, other.kept_tokens) == (pb.WARM_STATUS_WARMED, 112)
    push_out(server)
    assert warmed(server, 90, 112, "other", 30).cached_prefix_tokens == 112
    assert warmed(server, 40, 256, "greedy", 3600).cached_prefix_tokens == 144, "of which the others took a part"


def test_warming_again_for_a_shorter_time_is_true(server):
    assert warmed(server, 40, 256, "one", 3600).kept_tokens == 256
    again = warmed(server, 40, 256, "one", 1e-3)
    assert (again.status, again.kept_tokens, again.ttl_seconds) == (pb.WARM_STATUS_ALREADY_WARM, 256, 1e-3)
    assert warmed(server, 41, 256, "one", 30).kept_tokens == 256, "there is room for it once more"
    push_out(server)
    assert warmed(server, 41, 256, "one", 30).cached_prefix_tokens == 256
    assert warmed(server, 40, 16, "one", 30).cached_prefix_tokens == 0
