"""BeamSearch behind a real server: what transformers' generate finds, told on the wire; and what is refused."""

import asyncio
import json

import grpc
import numpy as np
import pytest
import torch

from batching.beams import BeamOptions
from batching.scheduler import CLASS_RESERVE
from prefixrank.v1 import scorer_pb2 as pb
from scorer.beam import MAX_BEAMS, MAX_SEARCHES
from scorer.client import AsyncScorerClient, ScorerError
from scorer.config import Config
from scorer.embedded import embedded_model
from scorer.errors import ConfigError
from scorer.runtime import Runtime
from tests.cases.live import PROFILE, live, pages_in_use, plain_tokenizer
from tests.scorer.test_beam import agree, by_transformers
from tests.scorer.test_security import TOKEN
from tests.scorer.test_server import Life
from tests.scorer.test_service import ended
from tests.tiny import tiny_model_dir

TEXT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
TITLES = [" Paris", " Berlin is where", " rice", " the capital of France"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("settings")
    lines = [json.dumps(title) for title in TITLES] + ["", json.dumps([40, 41, 42])]
    (directory / "titles.jsonl").write_text("\n".join(lines))
    constraints = {"titles": str(directory / "titles.jsonl")}
    with live(model_dir, PROFILE, directory, check=False, constraints=constraints, max_beam_tokens=640) as made:
        yield made


def asked(**given):
    default = {"raw_text": TEXT, "num_beams": 4, "max_new_tokens": 6, "request_id": "r1"}
    if given.keys() & {"query", "token_ids"}:
        del default["raw_text"]
    return pb.BeamSearchRequest(**(default | given))


def send(server, request, timeout=60.0):
    return server.runner.run(server.at.client.beam_search(request, timeout))


def refused(server, request):
    with pytest.raises(ScorerError) as caught:
        send(server, request)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    return {v.field: v.description for v in caught.value.violations}


class Found:
    """A sequence of the response as the comparison with transformers reads it."""

    def __init__(self, sequence):
        self.tokens, self.score = tuple(sequence.token_ids), sequence.score


def test_the_answer_is_that_of_generate(server):
    tokenizer, model = plain_tokenizer(server.directory), server.runtime.engine.model
    response = send(server, asked())
    prompt = np.array(tokenizer(TEXT).input_ids, np.int32)
    agree(
        [Found(s) for s in response.sequences],
        by_transformers(model, prompt, BeamOptions(4, 6, eos_ids=model.eos_token_ids)),
    )
    for sequence in response.sequences:
        assert sequence.text == tokenizer.decode(sequence.token_ids, skip_special_tokens=True)
        assert sum(sequence.token_log_probs) / len(sequence.token_ids) == pytest.approx(sequence.score, abs=1e-5)
    assert (response.request_id, response.model) == ("r1", server.runtime.info.model)
    assert (response.profile, response.profile_revision) == ("tiny", PROFILE.revision)


def test_usage_and_timings_add_up(server):
    prompt = np.random.default_rng(0).integers(12, 200, 50).tolist()
    request = asked(token_ids=pb.TokenIds(ids=prompt), ignore_eos=True, num_return_sequences=2)
    first, again = send(server, request), send(server, request)
    assert (len(first.sequences), first.steps) == (2, 6)
    assert first.usage.prefix_tokens == again.usage.prefix_tokens == 50
    assert (first.usage.cached_prefix_tokens, again.usage.cached_prefix_tokens) == (0, 49)
    assert again.usage.computed_tokens == 1 + 5 * 4
    assert first.usage.computed_tokens == 50 + again.usage.computed_tokens
    assert (first.passes, again.passes) == (1, 0)
    assert first.usage.item_tokens == 12
    assert again.usage.saved_tokens == 2 * 50 + 12 - 21
    stages = first.timings
    told = stages.tokenize_seconds + stages.queue_seconds + stages.plan_seconds + stages.forward_seconds
    assert 0 < told <= stages.total_seconds * 1.001
    assert {s.finish_reason for s in first.sequences} == {pb.FINISH_REASON_LENGTH}


def test_a_query_is_prompted_by_the_profile(server):
    response = send(server, asked(query=pb.QueryPrefix(text="rice")))
    text = PROFILE.prefix.replace("{query}", "rice")
    assert response.sequences == send(server, asked(raw_text=text)).sequences


def allowed(server, titles):
    tokenizer = plain_tokenizer(server.directory)
    return [tokenizer(title, add_special_tokens=False).input_ids for title in titles]


def test_a_constraint_by_name_by_texts_and_by_tokens(server):
    sequences = allowed(server, TITLES)
    longest = max(map(len, sequences)) + 1
    by_texts = pb.Constraint(texts=pb.AllowedTexts(texts=TITLES))
    by_tokens = pb.Constraint(tokens=pb.AllowedTokens(sequences=[pb.TokenIds(ids=s) for s in sequences]))
    ways = [by_texts, by_tokens, pb.Constraint(name="titles")]
    found = [send(server, asked(constraint=way, max_new_tokens=longest, num_beams=5)) for way in ways]
    assert found[0].sequences == found[1].sequences
    assert sorted(s.text for s in found[0].sequences) == sorted(TITLES)
    assert {s.finish_reason for s in found[0].sequences} == {pb.FINISH_REASON_EOS}
    assert [list(s.token_ids)[:-1] for s in found[2].sequences if s.text not in TITLES] == [[40, 41, 42]]
    assert list(server.runner.run(server.at.client.model_info()).constraints) == ["titles"]


def test_without_eos_an_allowed_sequence_is_complete_by_itself(server):
    constraint = pb.Constraint(tokens=pb.AllowedTokens(sequences=[pb.TokenIds(ids=[20, 30]), pb.TokenIds(ids=[21])]))
    response = send(server, asked(constraint=constraint, ignore_eos=True))
    assert sorted(tuple(s.token_ids) for s in response.sequences) == [(20, 30), (21,)]
    assert {s.finish_reason for s in response.sequences} == {pb.FINISH_REASON_CONSTRAINT}


def token_constraint(*sequences):
    return pb.Constraint(tokens=pb.AllowedTokens(sequences=[pb.TokenIds(ids=s) for s in sequences]))


LONG = pb.TokenIds(ids=[20] * 3700)


@pytest.mark.parametrize(
    ("given", "field", "told"),
    [
        ({"num_beams": 0}, "num_beams", f"between 1 and {MAX_BEAMS}, got 0"),
        ({"num_beams": 513, "max_new_tokens": 1}, "num_beams", "between 1 and 512, got 513"),
        ({"max_new_tokens": 0}, "max_new_tokens", "at least 1, got 0"),
        (
            {"num_beams": 100, "max_new_tokens": 8},
            "max_new_tokens",
            "num_beams * (max_new_tokens - 1) of at most 639, got 100 * 7",
        ),
        (
            {"num_beams": 1, "max_new_tokens": 600, "token_ids": LONG},
            "max_new_tokens",
            "at most 396 behind a prompt of 3700 tokens, got 600",
        ),
        ({"num_return_sequences": 5}, "num_return_sequences", "at most num_beams, 4, got 5"),
        ({"length_penalty": 17.0}, "length_penalty", "between -16 and 16, got 17.0"),
        ({"length_penalty": float("nan")}, "length_penalty", "between -16 and 16, got nan"),
        ({"early_stopping": 9}, "early_stopping", "between 0 and 3, got 9"),
        ({"priority": 9}, "priority", "between 0 and 3, got 9"),
        ({"eos_token_ids": [600]}, "eos_token_ids", "below the vocabulary size 512, got 600"),
        ({"eos_token_ids": range(17)}, "eos_token_ids", "at most 16, got 17"),
        ({"eos_token_ids": [7, 8], "ignore_eos": True}, "eos_token_ids", "absent where ignore_eos is set, got [7, 8]"),
        ({"constraint": pb.Constraint()}, "constraint", "one of tokens, texts and name"),
        (
            {"constraint": pb.Constraint(name="no")},
            "constraint.name",
            "one that the service was started with (titles), got 'no'",
        ),
        ({"constraint": token_constraint()}, "constraint.tokens.sequences", "at least one sequence, got 0"),
        ({"constraint": token_constraint([1], [])}, "constraint.tokens.sequences[1]", "at least one token, got 0"),
        (
            {"constraint": token_constraint([1], [2, 99999, 3])},
            "constraint.tokens.sequences[1]",
            "below the vocabulary size 512, got 99999",
        ),
        (
            {"constraint": pb.Constraint(texts=pb.AllowedTexts(texts=["a", ""]))},
            "constraint.texts.texts[1]",
            "at least one token, got 0",
        ),
        ({"token_ids": pb.TokenIds()}, "token_ids.ids", "not empty"),
        ({"raw_text": ""}, "raw_text", "not empty"),
    ],
)  # fmt: skip
def test_what_is_refused_names_field_and_limit(server, given, field, told):
    assert refused(server, asked(**given))[field] == told


def test_no_prompt_is_refused(server):
    assert "query.text" in refused(server, pb.BeamSearchRequest(num_beams=1, max_new_tokens=1))


def test_all_that_is_wrong_is_told_at_once(server):
    found = refused(server, asked(num_beams=0, max_new_tokens=0, early_stopping=7))
    assert set(found) == {"num_beams", "max_new_tokens", "early_stopping"}


def test_calls_are_counted_as_scores_are(server):
    before, steps = ended(server.at.metrics).get("OK", 0), server.metric("beam_steps_total")
    timed = {"stage": "total", "method": "beam_search", "priority": "low"}
    searches = server.metric("stage_seconds_count", **timed)
    response = send(server, asked(ignore_eos=True, priority=pb.PRIORITY_LOW))
    assert server.metric("stage_seconds_count", **timed) == searches + 1
    assert ended(server.at.metrics)["OK"] == before + 1
    assert server.metric("beam_steps_total") == steps + response.steps
    assert server.metric("beam_sequences_total", end="length") >= 4
    assert server.metric("in_flight_requests") == 0


def test_a_deadline_ends_a_search(server):
    with pytest.raises(ScorerError) as caught:
        send(server, asked(num_beams=2, max_new_tokens=300, ignore_eos=True), timeout=0.05)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(send(server, asked()).sequences) == 4
    assert server.runtime.beams.under_way == 0
    assert pages_in_use(server.runtime.batcher) == 0


def test_a_caller_who_leaves_ends_a_search(server):
    async def leave():
        call = asyncio.ensure_future(server.at.client.beam_search(asked(max_new_tokens=100, ignore_eos=True)))
        while not server.runtime.beams.under_way:
            await asyncio.sleep(0.001)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        while server.runtime.beams.under_way:
            await asyncio.sleep(0.001)

    server.runner.run(leave())
    assert pages_in_use(server.runtime.batcher) == 0


def test_tenants_and_priorities_share_the_service(server):
    """A flood of long searches leaves room to others, who do not wait for its end."""

    def long(priority):
        return asked(num_beams=2, max_new_tokens=300, ignore_eos=True, tenant="flood", priority=priority)

    async def scenario():
        client, beams = server.at.client, server.runtime.beams
        flood = [asyncio.ensure_future(client.beam_search(long(pb.PRIORITY_LOW), 3600.0)) for _ in range(MAX_SEARCHES)]
        most = MAX_SEARCHES - int(MAX_SEARCHES * CLASS_RESERVE[-1])
        while sum(call.done() for call in flood) < MAX_SEARCHES - most:
            await asyncio.sleep(0.001)
        refused = [call.exception() for call in flood if call.done()]
        found = await client.beam_search(asked(tenant="other", priority=pb.PRIORITY_HIGH))
        under_way = beams.under_way
        for call in flood:
            call.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        while beams.under_way:
            await asyncio.sleep(0.001)
        return refused, found, under_way, most

    before = server.metric("admission_refusals_total", reason="tenant_share")
    refused, found, under_way, most = server.runner.run(scenario())
    assert under_way == most, "none of the flood has ended"
    assert len(found.sequences) == 4
    assert {error.code for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert "beam searches of this tenant are under way" in refused[0].message
    assert server.metric("admission_refusals_total", reason="tenant_share") == before + len(refused)


def test_a_service_without_room_for_beams_says_so(model_dir, tmp_path):
    with live(model_dir, PROFILE, tmp_path, check=False, max_beam_tokens=0) as made:
        with pytest.raises(ScorerError, match="max_beam_tokens is 0") as caught:
            send(made, asked())
        assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
        assert made.runner.run(made.at.client.model_info()).limits.max_num_beams == 0


def test_a_prompt_beyond_the_cache_is_refused_by_its_field(model_dir, tmp_path):
    with live(model_dir, PROFILE, tmp_path, check=False, cache_tokens=64) as made:
        ids = pb.TokenIds(ids=[20] * 65)
        assert len(send(made, asked(token_ids=ids)).sequences) == 4
        ids.ids.append(20)
        told = "at most 65 tokens, as the prefix cache (cache_tokens) holds no more, got 66"
        assert refused(made, asked(token_ids=ids)) == {"token_ids.ids": told}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{}", "line 2: an array of token ids or a string"),
        ("[600]", "below the vocabulary size 512"),
        ('""', "line 2: a text"),
        ("[", "Expecting"),
    ],
)
def test_a_bad_constraint_file_stops_the_start(model_dir, tmp_path, line, told):
    (tmp_path / "bad.jsonl").write_text(f"[1]\n{line}\n")
    settings = {"model": str(model_dir), "profile": "instruct", "constraints": f"bad={tmp_path / 'bad.jsonl'}"}
    with pytest.raises(ConfigError, match="constraint bad: ") as caught:
        Runtime.load(Config.read(settings, environ={}))
    assert told in str(caught.value)


def test_beams_ask_for_a_token_as_scores_do(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"{TOKEN}\n")

    async def scenario():
        async with Life(auth_tokens_file=str(path)) as life:
            target = await life.listening()
            codes = []
            for token in (None, TOKEN):
                async with AsyncScorerClient(target, token=token) as client:
                    await asyncio.sleep(0)
                    with pytest.raises(ScorerError) as caught:
                        await client.beam_search(asked())
                    codes.append(caught.value.code.name)
            return codes

    assert asyncio.run(scenario()) == ["UNAUTHENTICATED", "UNIMPLEMENTED"]  # the fake behind it searches none


@pytest.mark.parametrize("constrained", [False, True])
def test_the_embedded_model_finds_what_generate_finds(tmp_path, constrained):
    directory = embedded_model()
    text = "<|im_start|>user\nName the capital of France.<|im_end|>\n<|im_start|>assistant\n"
    titles = ["The capital of France is Paris.", "Paris", "Paris, France", "Lyon", "Berlin", "The city of Paris"]
    with live(directory, "smollm2", tmp_path, check=False) as made:
        model, tokenizer = made.runtime.engine.model, plain_tokenizer(directory)
        prompt = np.array(tokenizer(text, add_special_tokens=False).input_ids, np.int32)
        sequences = {tuple(ids) for ids in allowed(made, titles)} if constrained else None
        constraint = pb.Constraint(texts=pb.AllowedTexts(texts=titles)) if constrained else None
        response = send(made, asked(raw_text=text, num_beams=4, max_new_tokens=8, constraint=constraint))
        with torch.inference_mode():
            expected = by_transformers(model, prompt, BeamOptions(4, 8, eos_ids=model.eos_token_ids), sequences)
        agree([Found(s) for s in response.sequences], expected)
