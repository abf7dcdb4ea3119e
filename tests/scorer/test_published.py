"""Profiles whose published code encodes the parts of a prompt apart: the same ids, where a tokenizer would merge."""

import pytest

from prefixrank.v1 import scorer_pb2 as pb
from scorer.client import build_request
from scorer.config import Limits, cache_dir
from scorer.errors import ProfileError
from scorer.profile import Profile, load_profile
from scorer.seams import AWKWARD_DOCUMENTS, AWKWARD_QUERIES
from scorer.tokenization import Tokenization, load_tokenizer
from tests.tiny import prepending_tokenizer, tiny_tokenizer

QWEN3 = cache_dir() / "qwen3-tokenizer"
LIMITS = Limits(100, 1 << 20, 8192, 8192, 2048, 4096, 8192, 1 << 26, 200_000)
QUERIES = (*AWKWARD_QUERIES, "ends with a newline\n", "a\n\n")
DOCUMENTS = (*AWKWARD_DOCUMENTS, "a\n", "\n\na\n\n")

BGE_PROMPT = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
    "prediction of either 'Yes' or 'No'."
)
MXBAI_SYSTEM = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n"
)
MXBAI_TASK = (
    "You are a search relevance expert who evaluates how well documents match search queries. For each query-document "
    "pair, carefully analyze the semantic relationship between them, then provide your binary relevance judgment (0 "
    "for not relevant, 1 for relevant).\nRelevance:"
)
MXBAI_END = "<|im_end|>\n<|im_start|>assistant\n"
# The strings that each published code encodes apart and then joins; BOS where the tokenizer has one.
PUBLISHED = {
    "bge-reranker-v2-gemma": lambda q, d: [f"A: {q}", "\n", f"B: {d}", "\n", BGE_PROMPT],
    "mxbai-rerank-v2": lambda q, d: [MXBAI_SYSTEM, f"query: {q}", "\n", f"document: {d}", "\n", MXBAI_TASK, MXBAI_END],
}
TOKENIZERS = {
    "merging": tiny_tokenizer,
    "bos": lambda: tiny_tokenizer(bos=True),
    "bpe": lambda: prepending_tokenizer("bpe", "normalizer"),
    "unigram": lambda: prepending_tokenizer("unigram", "first"),
    "qwen3": lambda: load_tokenizer(QWEN3),
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    if request.param == "qwen3" and not (QWEN3 / "tokenizer.json").is_file():
        pytest.skip("no Qwen3 tokenizer in the cache; get it with: scripts/fetch_qwen3_tokenizer.sh")
    return TOKENIZERS[request.param]()


def tokenization(tokenizer, name):
    """Under labels that every one of these tokenizers has a token for."""
    profile = load_profile(name)
    if len(tokenizer.tokenize(profile.positive)) != 1 or tokenizer.vocab_size < 600:
        letters = ("a", "b")[: len(profile.labels)]
        profile = profile.model_copy(update={"labels": letters, "positive": "a"})
    return Tokenization(tokenizer, profile, LIMITS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_ids_are_those_of_the_published_code(name, tokenizer):
    made = tokenization(tokenizer, name)
    made.prove()
    lead = tokenizer("a").input_ids[: -len(tokenizer("a", add_special_tokens=False).input_ids)]
    for query in QUERIES:
        documents = [d for d in DOCUMENTS if "</think>" not in d]  # a control token of Qwen3's
        found = made.tokenize(build_request(query, documents)).request
        kept = iter(found.items)
        for document in documents:
            if document == "\ufeffBOM" or document.strip():
                parts = PUBLISHED[name](query, document)
                ids = [i for part in parts for i in tokenizer(part, add_special_tokens=False).input_ids]
                assert [*found.prefix.tolist(), *next(kept).ids.tolist()] == [*lead, *ids], (query, document)
        assert next(kept, None) is None


def test_without_the_seams_these_ids_would_be_others():
    tokenizer = tiny_tokenizer()
    profile = load_profile("bge-reranker-v2-gemma")
    joined = profile.model_copy(update={"prefix": profile.prefix.replace("{seam}", ""), "item": " {document}\n\nYes?"})
    with pytest.raises(ProfileError, match=r"merges across the seam"):
        Tokenization(tokenizer, joined, LIMITS).prove()


def test_render_writes_nothing_for_a_seam():
    made = tokenization(tiny_tokenizer(), "bge-reranker-v2-gemma")
    assert "".join(made.render("q", "d")) == f"A: q\nB: d\n{BGE_PROMPT}"


@pytest.mark.parametrize("field", ["prefix", "item"])
def test_a_seam_at_the_end_has_no_meaning_and_is_refused(field):
    fields = {"name": "x", "kind": "label_logits", "prefix": "{query}", "item": "{document}", "labels": ("yes",)}
    fields |= {"positive": "yes", field: f"{fields[field]}{{seam}}"}
    with pytest.raises(ValueError, match=f"{field}: {{seam}} stands before the text"):
        Profile(**fields)


@pytest.mark.parametrize("name", PUBLISHED)
def test_profiles_never_run_on_their_checkpoint_say_so(name):
    assert not load_profile(name).verified


def test_a_placeholder_written_by_a_user_is_text():
    made = tokenization(tiny_tokenizer(), "bge-reranker-v2-gemma")
    request = pb.ScoreRequest(
        query=pb.QueryPrefix(text="{seam} q"), documents=[pb.Document(text="a{seam}b {document}")]
    )
    found = made.tokenize(request).request
    tokenizer = tiny_tokenizer()
    text = tokenizer.decode([*found.prefix.tolist(), *found.items[0].ids.tolist()])
    assert text == f"A: {{seam}} q\nB: a{{seam}}b {{document}}\n{BGE_PROMPT}"
