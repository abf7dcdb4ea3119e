"""`prefixrank eval` on a small collection: figures as by transformers alone, runs that go on where they stopped, bad
input by file and line."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from prefixrank.v1 import scorer_pb2 as pb
from scorer.__main__ import main
from scorer.collection import Collection
from scorer.errors import ConfigError
from scorer.evaluate import bm25, measured, rerank
from scorer.run_file import RunFile
from tests.tiny import tiny_model_dir

QUERIES, DOCUMENTS, DEPTH = 6, 40, 12
WORDS = """capital France Paris Brazil London Berlin government bananas grow warm climates password settings security
    reset rice ways cook passage query relevant document meets requirements""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    """Seeded: texts of three to sixty words, titles to half of them, graded judgements, a query that nobody judged."""
    directory, rng = tmp_path_factory.mktemp("collection"), np.random.default_rng(4)

    def words(count):
        return " ".join(rng.choice(WORDS, count))

    documents = [{"_id": f"<d:{i}>", "text": words(int(rng.integers(3, 60)))} for i in range(DOCUMENTS)]
    for document in documents[::2]:
        document["title"] = words(2)
    queries = [{"_id": f"q{i}", "text": words(3)} for i in range(QUERIES)]
    qrels = [
        f"q{q} 0 <d:{d}> {int(rng.integers(0, 3))}"
        for q in range(QUERIES - 1)
        for d in rng.choice(DOCUMENTS, 15, replace=False)
    ]
    for name, lines in (
        ("corpus.jsonl", map(json.dumps, documents)),
        ("queries.jsonl", map(json.dumps, queries)),
        ("qrels.trec", qrels),
    ):
        (directory / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return directory


def arguments(collection, model, run_file, *more):
    given = [f"--collection={collection}", f"--model={model}", "--profile=instruct", f"--depth={DEPTH}"]
    return ["eval", *given, f"--run-file={run_file}", "--threads=1", *more]


def figures(output):
    """(nDCG@10, MRR) by the name of the row."""
    found = re.findall(r"(BM25|reranked)\D+?(\d\.\d{4})\D+?(\d\.\d{4})", output)
    return {name: (float(ndcg), float(mrr)) for name, ndcg, mrr in found}


def scores(path):
    return {tuple(line.split()[i] for i in (0, 2)): float(line.split()[4]) for line in path.read_text().splitlines()}


def test_figures_are_those_of_transformers_alone(collection, model, tmp_path, capsys):
    assert main(arguments(collection, model, tmp_path / "packed.run")) == 0
    packed = figures(capsys.readouterr().out)
    assert main(arguments(collection, model, tmp_path / "plain.run", "--plain")) == 0
    plain = figures(capsys.readouterr().out)
    assert packed == plain
    assert set(packed) == {"BM25", "reranked"}
    assert packed["BM25"] != packed["reranked"]
    one, other = scores(tmp_path / "packed.run"), scores(tmp_path / "plain.run")
    assert one.keys() == other.keys()
    assert len(one) > 40
    assert max(abs(one[key] - other[key]) for key in one) <= 1e-4
    assert np.ptp(list(one.values())) > 0.1


def test_figures_are_what_their_definitions_say(collection, model, tmp_path, capsys):
    """nDCG with linear gains over log2(rank + 1), and the reciprocal rank of the first relevant document."""
    assert main(arguments(collection, model, tmp_path / "a.run")) == 0
    told, read = figures(capsys.readouterr().out)["reranked"], Collection.read(collection)
    ranked = {}
    for query, document in scores(tmp_path / "a.run"):
        ranked.setdefault(query, []).append(document)  # the file is best first
    ndcg, mrr = [], []
    for query in read.first_judged(None):
        grades = [read.qrels[query].get(document, 0) for document in ranked.get(query, [])]
        ideal = sorted(read.qrels[query].values(), reverse=True)
        gain, best = (sum(g / np.log2(i + 2) for i, g in enumerate(x[:10])) for x in (grades, ideal))
        ndcg.append(gain / best)
        mrr.append(next((1 / (i + 1) for i, g in enumerate(grades) if g > 0), 0.0))
    assert told == (pytest.approx(np.mean(ndcg), abs=6e-5), pytest.approx(np.mean(mrr), abs=6e-5))


def test_the_queries_are_the_first_judged_ones_and_the_pools_bm25s(collection):
    read = Collection.read(collection)
    assert list(read.first_judged(None)) == [f"q{i}" for i in range(QUERIES - 1)]
    pools = bm25(read, read.first_judged(2), DEPTH)
    assert list(pools) == ["q0", "q1"]
    for query, pool in pools.items():
        assert 0 < len(pool) <= DEPTH
        assert list(pool.values()) == sorted(pool.values(), reverse=True)
        words = set(read.queries[query].lower().split())
        assert all(words & set(read.documents[id].lower().split()) for id in pool)
        left_out = [id for id in read.documents if id not in pool and words & set(read.documents[id].lower().split())]
        assert len(pool) == DEPTH or not left_out
    title = json.loads((collection / "corpus.jsonl").read_text().splitlines()[0])["title"]
    assert read.documents["<d:0>"].startswith(f"{title} ")


def test_equal_documents_stand_in_the_collections_order():
    texts = ["bananas grow"] * 30 + ["bananas bananas grow"] + ["bananas grow"] * 30
    documents = {f"d{i}": text for i, text in enumerate(texts)}
    pool = bm25(Collection(documents, {"q": "bananas"}, {}), ["q"], 40)["q"]
    assert list(pool) == ["d30", *(f"d{i}" for i in range(39 + 1) if i != 30)][:40]


@pytest.mark.parametrize("text", ["", "the of and", "zebra", "?!"])
def test_a_query_that_shares_no_word_has_no_candidates(text):
    collection = Collection({"d": "bananas grow", "e": "rice"}, {"q": text, "r": "bananas"}, {})
    pools = bm25(collection, ["q", "r"], 5)
    assert {query: list(pool) for query, pool in pools.items()} == {"q": [], "r": ["d"]}


def test_jax_where_it_is_installed_leaves_the_gpu_alone(tmp_path):
    """bm25s runs a product on it when it is imported, and JAX takes three quarters of a GPU's memory."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("")
    (tmp_path / "jax" / "lax.py").write_text(
        "import os\nprint('platforms', os.environ.get('JAX_PLATFORMS'))\n"
        "def top_k(scores, k):\n    print('tried')\n    return scores[:k], scores[:k]\n"
    )
    script = """if True:
        from scorer.collection import Collection
        from scorer.evaluate import bm25
        print(list(bm25(Collection({"d": "bananas"}, {"q": "bananas"}, {}), ["q"], 1)["q"]))"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    environment.pop("JAX_PLATFORMS", None)
    told = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split("\n")[:3] == ["platforms cpu", "tried", "['d']"]


# --- runs that were interrupted


@pytest.fixture
def whole(collection, model, tmp_path, capsys):
    path = tmp_path / "whole.run"
    assert main(arguments(collection, model, path)) == 0
    capsys.readouterr()
    return path.read_text()


@pytest.mark.parametrize("cut", ["within a line", "within a query", "between queries", "before the first"])
def test_an_interrupted_run_goes_on_and_ends_as_if_it_had_not_been(cut, whole, collection, model, tmp_path, capsys):
    lines = whole.splitlines(keepends=True)
    second = next(i for i, line in enumerate(lines) if line.startswith("q1"))
    kept = {
        "within a line": "".join(lines[: second + 2]) + lines[second + 2][:9],
        "within a query": "".join(lines[: second + 2]),
        "between queries": "".join(lines[:second]),
        "before the first": lines[0][:5],
    }[cut]
    path = tmp_path / "cut.run"
    path.write_text(kept)
    assert main(arguments(collection, model, path)) == 0
    told = capsys.readouterr()
    assert path.read_text() == whole
    assert ("1 of 5 queries are in" in told.err) == (cut != "before the first")


def test_what_is_done_is_not_scored_again(whole, collection, model, tmp_path):
    read = Collection.read(collection)
    pools = bm25(read, read.first_judged(None), DEPTH)
    asked = []

    def score(request):
        asked.append(request.query.text)
        results = [pb.DocumentResult(id=d.id, index=i, score=-i) for i, d in enumerate(request.documents)]
        return pb.ScoreResponse(results=results, model="m", profile="p", profile_revision="r")

    path = tmp_path / "fake.run"
    for queries in (2, None, 1, None):
        reranked(read, pools, queries, score, path)
    judged = [read.queries[q] for q in read.first_judged(None)]
    first, *scored = [text for text in asked if text != "a query"]
    assert scored == [judged[1], judged[0], *judged[2:], judged[0], judged[0]], "once each, and the first to compare"
    assert first == judged[0]
    assert len(path.read_text().splitlines()) == sum(map(len, pools.values()))


def reranked(read, pools, queries, score, path):
    args = SimpleNamespace(run_file=path, depth=DEPTH, max_tokens_per_document=0, plain=False)
    chosen = read.first_judged(queries)
    return rerank(read, {query: pools[query] for query in chosen}, score, args)


@pytest.mark.parametrize("queries", [2, None], ids=["all that was scored", "more"])
def test_the_run_of_a_model_that_was_trained_since_is_not_continued(queries, collection, tmp_path):
    read = Collection.read(collection)
    pools, path = bm25(read, read.first_judged(None), DEPTH), tmp_path / "a.run"

    def model(change):
        def score(request):
            results = [
                pb.DocumentResult(id=d.id, index=i, score=i + change * (i % 2)) for i, d in enumerate(request.documents)
            ]
            return pb.ScoreResponse(results=results, model="m", profile="p", profile_revision="r")

        return score

    reranked(read, pools, 2, model(0.0), path)
    reranked(read, pools, 2, model(0.02), path)  # rounding
    before = path.read_text()
    with pytest.raises(ConfigError, match=r"a\.run holds another model's run.* scores of query q0 are 0\.\d+ apart"):
        reranked(read, pools, queries, model(0.5), path)
    assert path.read_text() == before


@pytest.mark.parametrize("more", [[], ["--plain"]], ids=["service", "plain"])
def test_a_query_that_the_model_cannot_take_stops_no_other(more, collection, model, tmp_path, capsys):
    own = tmp_path / "own"
    own.mkdir()
    for name in ("corpus.jsonl", "qrels.trec"):
        (own / name).write_text((collection / name).read_text())
    lines = [json.loads(line) for line in (collection / "queries.jsonl").read_text().splitlines()]
    lines[1]["text"] = "bananas " * 5000
    (own / "queries.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(arguments(own, model, tmp_path / "a.run", *more)) == 1
    told = capsys.readouterr()
    assert "query q1 is not scored" in told.err
    assert "query.text" in told.err
    ranked = [line.split()[0] for line in (tmp_path / "a.run").read_text().splitlines()]
    assert set(ranked) == {f"q{i}" for i in range(QUERIES - 1)}


def test_documents_without_a_score_are_last_and_told(collection, tmp_path):
    read = Collection.read(collection)
    pools = bm25(read, read.first_judged(1), DEPTH)

    def score(request):
        results = [pb.DocumentResult(id=d.id, index=i) for i, d in enumerate(request.documents)]
        for place, result in enumerate(results):
            if place % 3:
                result.score = place % 2  # ties, too
        return pb.ScoreResponse(results=results, model="m", profile="p", profile_revision="r")

    run_file, failed = reranked(read, pools, 1, score, tmp_path / "a.run")
    ids = list(pools["q0"])
    without = ids[::3]
    assert failed == len(without)
    ranked = [line.split()[2] for line in (tmp_path / "a.run").read_text().splitlines()]
    assert ranked[-len(without) :] == without
    assert ranked[: -len(without)] == [i for i in ids if ids.index(i) % 3 and ids.index(i) % 2] + [
        i for i in ids if ids.index(i) % 3 and not ids.index(i) % 2
    ]
    assert list(run_file.done["q0"].values()) == sorted(run_file.done["q0"].values(), reverse=True)


def test_another_models_run_is_not_continued(tmp_path):
    path = tmp_path / "a.run"
    path.write_text("q0 Q0 a 1 0.5 another:run\n")
    with pytest.raises(ConfigError, match="holds another run, another:run, not mine: name another file, or remove it"):
        RunFile(path, "mine", {"q0": ["a"]})
    assert path.read_text() == "q0 Q0 a 1 0.5 another:run\n"


@pytest.mark.parametrize("line", ["q0 Q0 a 1 half tag", "q0 Q0 a 1 tag", "a b c d e f g"])
def test_a_file_that_is_no_run_is_refused_by_its_line(line, tmp_path):
    path = tmp_path / "a.run"
    path.write_text(f"q0 Q0 a 1 0.5 tag\n{line}\n")
    with pytest.raises(ConfigError, match=r"a\.run, line 2: not a line of a TREC run"):
        RunFile(path, "tag", {})


def test_a_query_without_candidates_counts_as_nothing():
    read = Collection({"a": "x"}, {"q": "y", "r": "z"}, {"q": {"a": 1}, "r": {"a": 1}})
    assert measured(read, {"q": {"a": 1.0}}, ["q"]) == {"nDCG@10": 1.0, "MRR": 1.0}
    assert measured(read, {"q": {"a": 1.0}, "r": {}}, ["q", "r"]) == {"nDCG@10": 0.5, "MRR": 0.5}
    assert measured(read, {}, ["q", "r"]) == {"nDCG@10": 0.0, "MRR": 0.0}


# --- bad input


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("corpus.jsonl", None, "cannot read .*corpus.jsonl"),
        ("corpus.jsonl", '{"_id": "a", "text": "x"}\n{\n', "corpus.jsonl, line 2: not JSON"),
        ("corpus.jsonl", "[]\n", "corpus.jsonl, line 1: not an object"),
        ("corpus.jsonl", '{"_id": "a"}\n', "line 1: 'text' is missing or no text"),
        ("corpus.jsonl", '{"_id": "a", "text": "x", "title": 3}\n', "line 1: 'title' is missing or no text"),
        ("corpus.jsonl", '{"_id": "a b", "text": "x"}\n', "_id 'a b' is empty or has white space"),
        ("corpus.jsonl", '{"_id": "", "text": "x"}\n', "_id '' is empty or has white space"),
        ("corpus.jsonl", '{"_id": "a", "text": "x"}\n' * 2, "line 2: _id 'a' was there before"),
        ("queries.jsonl", '{"_id": 7, "text": "x"}\n', "line 1: '_id' is missing or no text"),
        ("queries.jsonl", "\xff\n".encode("latin-1"), "cannot read .*queries.jsonl"),
        ("qrels.trec", "q0 0 a\n", "qrels.trec, line 1: expected query id, iteration, document id and grade"),
        ("qrels.trec", "q0 0 a high\n", "qrels.trec, line 1: expected query id"),
        ("qrels.trec", "q0 0 a 0\n", "no query has a relevant document"),
    ],
)
def test_bad_collections_are_refused_by_file_and_line(file, text, told, collection, tmp_path, capsys):
    for path in collection.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if text is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["eval", f"--collection={tmp_path}"]) == 2
    assert re.search(told, capsys.readouterr().err)


@pytest.mark.parametrize("flag", ["--queries=0", "--depth=0", "--depth=many"])
def test_counts_are_at_least_one(flag, collection, capsys):
    with pytest.raises(SystemExit):
        main(["eval", f"--collection={collection}", flag])
    assert flag.split("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--plain"], ["--model=x"]])
def test_settings_do_not_go_with_a_server(more, collection, capsys):
    with pytest.raises(SystemExit):
        main(["eval", f"--collection={collection}", "--target=localhost:1", *more])
    assert "with --target the server has its own" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["bm25s", "ir_measures"])
def test_without_the_extra_it_says_what_to_install(package, collection, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    read = Collection.read(collection)
    with pytest.raises(ConfigError, match=r"pip install 'prefixrank\[eval\]'"):
        bm25(read, ["q0"], 3) if package == "bm25s" else measured(read, {}, ["q0"])


def test_a_server_that_is_gone_ends_it_with_what_was_scored(collection, tmp_path, capsys):
    assert main(["eval", f"--collection={collection}", "--target=127.0.0.1:1", "--timeout=1"]) == 2
    assert "UNAVAILABLE" in capsys.readouterr().err
