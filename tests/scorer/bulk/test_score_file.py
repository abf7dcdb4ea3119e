"""score-file over a fake server, over a tiny real model, stopped and gone on, and its files."""

import asyncio
import os
from argparse import Namespace

import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batching.batcher import DeviceFailed
from prefixrank.v1 import scorer_pb2 as pb
from scorer.__main__ import main
from scorer.bulk import command
from scorer.bulk.on_ray import ChunkScorer
from scorer.bulk.parts import Job, begun, finish, write_part
from scorer.bulk.rows import Options, Patience, ScoredRow, score_rows
from scorer.bulk.source import describe
from scorer.client import FieldViolation, ScorerClient, ScorerError
from scorer.demo import LOOPBACK_OPTIONS, Server
from scorer.errors import ConfigError
from tests.scorer.test_server import Life
from tests.scorer.test_service import FakeRuntime
from tests.tiny import tiny_model_dir


def pairs(path, rows, **columns):
    table = {"query": [q for q, _ in rows], "document": [d for _, d in rows], "id": list(range(len(rows))), **columns}
    pq.write_table(pa.table(table), path, row_group_size=7)
    return str(path)


def some(count):
    """Rows of four queries in turn; "logits N 0" will score N."""
    return [(f"query {n % 4}", f"logits {n} 0") for n in range(count)]


def score_file(tmp_path, source, *arguments, **others):
    """Exit code and output rows of a run over a fake server."""
    out = tmp_path / "out.parquet"
    code = exit_code(out, source, *arguments, **others)
    return code, pq.read_table(out).to_pylist() if out.exists() else None


def exit_code(output, source, *arguments, runtime=None, **settings):
    """Of a run over a fake server."""

    async def scenario():
        async with Life(runtime or FakeRuntime(), **settings) as life:
            asked = ["score-file", source, "-o", str(output), f"--target={await life.listening()}"]
            return await asyncio.to_thread(main, [*asked, *arguments])

    return asyncio.run(scenario())


def test_rows_come_back_in_order_with_their_columns_and_scores(tmp_path, capsys):
    source = pairs(tmp_path / "in.parquet", some(50), extra=[f"e{n}" for n in range(50)])
    code, rows = score_file(tmp_path, source, "--chunk-rows=12")
    assert code == 0
    assert [r["id"] for r in rows] == list(range(50))
    assert [r["score"] for r in rows] == [float(n) for n in range(50)]
    assert [r["extra"] for r in rows] == [f"e{n}" for n in range(50)]
    assert {r["status"] for r in rows} == {"OK"}
    assert rows[3]["document_tokens"] == 3
    assert capsys.readouterr().out == f"{tmp_path / 'out.parquet'}: 50 OK\n"
    assert sorted(os.listdir(tmp_path)) == ["in.parquet", "out.parquet"]


def test_rows_of_a_query_share_a_request(tmp_path):
    runtime = FakeRuntime()
    score_file(tmp_path, pairs(tmp_path / "in.parquet", some(48)), "--chunk-rows=24", runtime=runtime)
    assert runtime.batcher.submitted == 8


def test_bad_rows_stay_with_their_status_and_cost_no_other_its_score(tmp_path):
    rows = [("q", "logits 1 0"), (None, "x"), ("q", None), ("q", " "), ("q", "logits 2 0")]
    code, out = score_file(tmp_path, pairs(tmp_path / "in.parquet", rows))
    assert code == 0
    assert [r["status"] for r in out] == ["OK", "INVALID", "INVALID", "EMPTY", "OK"]
    assert out[1]["message"] == "query: a text, got null"
    assert out[1]["score"] is None
    assert [out[0]["score"], out[4]["score"]] == [1.0, 2.0]


def test_an_empty_file_has_an_empty_output(tmp_path):
    schema = pa.schema([("query", pa.string()), ("document", pa.string())])
    pq.write_table(schema.empty_table(), tmp_path / "in.parquet")
    code, out = score_file(tmp_path, str(tmp_path / "in.parquet"))
    assert (code, out) == (0, [])
    assert "score" in pq.read_schema(tmp_path / "out.parquet").names


class Failing(FakeRuntime):
    """Its device fails for good after so many requests."""

    def __init__(self, after):
        super().__init__()
        submit = self.batcher.submit

        async def failing(request, deadline=None):
            if self.batcher.submitted >= after:
                raise DeviceFailed("gone")
            return await submit(request, deadline)

        self.batcher.submit = failing


def test_a_job_that_was_stopped_goes_on_where_it_was(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("scorer.bulk.rows.WAIT_SECONDS", 0.001)
    source = pairs(tmp_path / "in.parquet", some(40))
    code, rows = score_file(tmp_path, source, "--chunk-rows=8", "--concurrency=1", runtime=Failing(9))
    assert (code, rows) == (1, None)
    assert "run it again to go on" in capsys.readouterr().err
    done = sorted(f for f in os.listdir(tmp_path / "out.parquet.parts") if f.endswith(".parquet"))
    assert done == ["00000000.parquet", "00000001.parquet"]
    again = FakeRuntime()
    code, rows = score_file(tmp_path, source, "--chunk-rows=8", runtime=again)
    assert code == 0
    assert again.batcher.submitted == 3 * 4, "three chunks were left"
    assert [r["score"] for r in rows] == [float(n) for n in range(40)]


def test_parts_of_another_job_are_never_mixed_in(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("scorer.bulk.rows.WAIT_SECONDS", 0.001)
    source = pairs(tmp_path / "in.parquet", some(40))
    assert score_file(tmp_path, source, "--chunk-rows=8", "--concurrency=1", runtime=Failing(5))[0] == 1
    assert score_file(tmp_path, source, "--chunk-rows=9")[0] == 2
    assert "chunk_rows changed" in capsys.readouterr().err
    other = FakeRuntime()
    other.info.profile_revision = "another"
    assert score_file(tmp_path, source, "--chunk-rows=8", runtime=other)[0] == 2
    assert "scorer changed" in capsys.readouterr().err
    assert score_file(tmp_path, source, "--chunk-rows=9", "--restart")[0] == 0


def test_a_full_queue_is_waited_for():
    asked = []

    async def ask(request):
        asked.append(len(request.documents))
        if len(asked) < 4:
            raise ScorerError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (), 0.001)
        return pb.ScoreResponse(results=[pb.DocumentResult(status=pb.DOCUMENT_STATUS_OK, score=1.0)])

    assert asyncio.run(score_rows([("q", "d")], ask, Options())) == [ScoredRow("OK", "", 1.0)]
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("columns", "arguments", "told"),
    [
        ({}, ["--query-column=q"], "has no column 'q'; it has query, document, id"),
        ({"score": [1.0]}, [], "already has the columns score"),
        ({"number": [1]}, ["--query-column=number"], "column 'number' is int64, and no text"),
        ({"bytes": [b"x"]}, ["--document-column=bytes"], "column 'bytes' is binary, and no text"),
    ],
)
def test_an_input_that_cannot_be_scored_is_refused_before_it_begins(tmp_path, capsys, columns, arguments, told):
    source = pairs(tmp_path / "in.parquet", [("q", "d")], **columns)
    assert main(["score-file", source, "-o", str(tmp_path / "o"), "--target=127.0.0.1:9", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_what_is_no_parquet_file_and_no_server_are_told(tmp_path, capsys):
    (tmp_path / "in.parquet").write_text("no parquet")
    assert main(["score-file", str(tmp_path / "in.parquet"), "-o", "o", "--target=127.0.0.1:9"]) == 2
    assert "no parquet file" in capsys.readouterr().err
    source = pairs(tmp_path / "good.parquet", [("q", "d")])
    assert main(["score-file", source, "-o", "o", "--target=127.0.0.1:9", "--timeout=0.3"]) == 2
    assert "127.0.0.1:9: not serving" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--workers=2"], "go with --ray"),
        (["--target=h:1", "--model=m"], "the server has its own"),
        (["--chunk-rows=0"], "--chunk-rows: a whole number between 1 and 2147483647, got '0'"),
        (["--chunk-rows=99999999999999999999"], "between 1 and 2147483647"),
        (["--concurrency=many"], "--concurrency: a whole number between 1 and 2147483647, got 'many'"),
        (["--max-tokens-per-document=-5"], "--max-tokens-per-document: a whole number between 0"),
        (["--max-tokens-per-document=99999999999"], "--max-tokens-per-document: a whole number between 0"),
        (["--timeout=nan"], "--timeout: a number between 0.001 and 1000000, got 'nan'"),
        (["--worker-gpus=-1", "--ray"], "--worker-gpus: a number between 0"),
    ],
)
def test_wrong_usage(capsys, arguments, told):
    with pytest.raises(SystemExit) as caught:
        main(["score-file", "in", "-o", "out", *arguments])
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_more_tokens_than_the_profile_allows_are_refused_before_anything_is_scored(tmp_path, capsys):
    runtime = FakeRuntime()
    most = runtime.limits.max_tokens_per_document
    source = pairs(tmp_path / "in.parquet", some(4))
    assert score_file(tmp_path, source, f"--max-tokens-per-document={most + 1}", runtime=runtime) == (2, None)
    assert f"--max-tokens-per-document: at most {most}, the limit of profile fake" in capsys.readouterr().err
    assert runtime.batcher.submitted == 0
    assert score_file(tmp_path, source, f"--max-tokens-per-document={most}")[0] == 0


def test_what_is_wrong_for_every_row_ends_the_job():
    asked = []

    async def ask(request):
        asked.append(request)
        raise ScorerError(grpc.StatusCode.INVALID_ARGUMENT, "bad", [FieldViolation("options.truncation", "known")])

    with pytest.raises(ExceptionGroup):
        asyncio.run(score_rows([("q", "d"), ("q", "e")], ask, Options()))
    assert len(asked) == 1


def test_bytes_that_are_no_utf8_are_bad_rows(tmp_path):
    texts = [b"logits 1 0", b"ok\xff\xfe", None, b"logits 4 0", b"\xed\xa0\x80"]
    good = pa.array(["q"] * 5)
    bad = pa.array(texts, pa.binary()).cast(pa.binary()).view(pa.string())
    for kind, queries, documents in (("document", good, bad), ("query", bad, pa.array(["logits 1 0"] * 5))):
        path = tmp_path / f"{kind}.parquet"
        pq.write_table(pa.table({"query": queries, "document": documents, "raw": bad}), path)
        out = tmp_path / f"{kind}-scored.parquet"
        assert exit_code(out, str(path), "--chunk-rows=3") == 0
        rows = pq.read_table(out, columns=["status", "message"]).to_pylist()
        assert [r["status"] for r in rows] == ["OK", "INVALID", "INVALID", "OK", "INVALID"]
        assert rows[1]["message"] == f"{kind}: UTF-8 text, got byte 0xff at byte 3"
        assert pq.read_table(out)["raw"].cast(pa.binary()).to_pylist() == texts, "other columns stay, byte by byte"


def test_a_column_that_is_there_twice_is_named(tmp_path, capsys):
    twice = pa.Table.from_arrays([pa.array(["a"])] * 3, names=["query", "query", "document"])
    pq.write_table(twice, tmp_path / "in.parquet")
    assert score_file(tmp_path, str(tmp_path / "in.parquet")) == (2, None)
    assert "has 2 columns 'query'" in capsys.readouterr().err


def test_other_columns_stay_whatever_they_and_the_folder_are_called(tmp_path):
    names = ["query", "document", "x", "x"]
    pq.write_table(pa.Table.from_arrays([pa.array(["q"])] * 4, names=names), tmp_path / "in.parquet")
    (tmp_path / "day=1").mkdir()
    output = tmp_path / "day=1" / "out.parquet"
    assert exit_code(output, str(tmp_path / "in.parquet")) == 0
    with pq.ParquetFile(output) as file:
        assert file.schema_arrow.names[:5] == [*names, "score"]


def test_rows_over_the_message_limit_get_their_status_and_the_others_their_scores(tmp_path):
    documents = ["logits 1 0", "word " * 1000, *[f"logits {n} 0" + " " * 500 for n in range(2, 8)]]
    source = pairs(tmp_path / "in.parquet", [("q", document) for document in documents])
    code, rows = score_file(tmp_path, source, max_message_bytes=2048)
    assert code == 0
    assert [r["status"] for r in rows] == ["OK", "INVALID", *["OK"] * 6]
    assert "larger than max" in rows[1]["message"]
    assert [r["score"] for r in rows[2:]] == [float(n) for n in range(2, 8)]


def test_a_long_wait_is_told_once_in_a_while(capsys):
    clock = Clock()
    patience = Patience(clock)
    full = ScorerError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    def told_after(seconds):
        clock.now += seconds
        patience.refused(full)
        return capsys.readouterr().err

    assert told_after(29) == ""
    assert told_after(2) == "prefixrank: the scorer has had no room for 31 s, still trying: full\n"
    assert told_after(20) == ""
    assert "for 61 s" in told_after(10)
    patience.answered()
    assert told_after(29) == ""


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_the_input_is_never_replaced(tmp_path):
    source = pairs(tmp_path / "in.parquet", [("q", "d")])
    with pytest.raises(SystemExit):
        main(["score-file", source, "-o", source])
    assert pq.read_table(source).num_rows == 1


@pytest.mark.parametrize("chunk_rows", [1, 5, 7, 10, 100])
def test_chunks_are_even_whatever_the_row_groups(tmp_path, chunk_rows):
    source = pairs(tmp_path / "in.parquet", some(33))
    job = job_of(tmp_path, source, chunk_rows)
    found = list(job.source.tables(chunk_rows, range(job.chunks)))
    assert [number for number, _ in found] == list(range(job.chunks))
    assert [t.num_rows for _, t in found[:-1]] == [chunk_rows] * (job.chunks - 1)
    assert [n for _, t in found for n in t["id"].to_pylist()] == list(range(33))
    (only,) = list(job.source.tables(chunk_rows, [job.chunks - 1]))
    assert only[1].equals(found[-1][1])
    with begun(job):
        for number, table in found:
            write_part(job, number, table, [ScoredRow("OK", "", 0.5)] * table.num_rows)
        assert finish(job) == {"OK": 33}
    assert not job.parts.exists()


def job_of(tmp_path, source, chunk_rows, scorer="s"):
    return Job(describe(source, "query", "document"), str(tmp_path / "out.parquet"), chunk_rows, scorer, 0)


def parts_by(job, *chunks):
    """The folder of parts as a run leaves it that was killed after these chunks."""
    with begun(job):
        for number, table in job.source.tables(job.chunk_rows, chunks):
            write_part(job, number, table, [ScoredRow("OK", "", -1.0)] * table.num_rows)


def test_what_a_killed_run_has_half_written_is_no_part_and_goes(tmp_path):
    job = job_of(tmp_path, pairs(tmp_path / "in.parquet", some(4)), 2)
    parts_by(job, 0)
    (job.parts / ".0123.tmp").write_bytes(b"half")
    assert job.pending() == [1]
    with begun(job):
        assert not list(job.parts.glob(".*"))


def test_the_output_is_written_among_the_parts_until_it_is_whole(tmp_path, monkeypatch):
    job = job_of(tmp_path, pairs(tmp_path / "in.parquet", some(4)), 2)
    parts_by(job, 0, 1)
    before = sorted(os.listdir(tmp_path))
    seen = []

    class Seeing(pq.ParquetWriter):
        def write_table(self, table, *rest):
            seen.append(sorted(os.listdir(tmp_path)))
            super().write_table(table, *rest)

    monkeypatch.setattr("scorer.bulk.parts.pq.ParquetWriter", Seeing)
    with begun(job):
        finish(job)
    assert seen == [before, before]
    assert sorted(os.listdir(tmp_path)) == ["in.parquet", "out.parquet"]


@pytest.mark.parametrize("killed_after", range(4))
def test_a_run_killed_while_it_removes_the_parts_leaves_none_that_nobody_knows(tmp_path, monkeypatch, killed_after):
    source = pairs(tmp_path / "in.parquet", some(6))
    job = job_of(tmp_path, source, 2)
    parts_by(job, 0, 1, 2)
    left = [killed_after]
    unlink = type(job.parts).unlink

    def dying(path, missing_ok=False):
        if path.suffix in (".parquet", ".json"):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(type(job.parts), "unlink", dying)
        with pytest.raises(KeyboardInterrupt), begun(job, restart=True):
            pass
    assert len(list(job.parts.glob("0*.parquet"))) == 3 - killed_after
    assert score_file(tmp_path, source, "--chunk-rows=2") == (2, None), "another scorer's parts, whichever are left"
    with begun(job):
        assert len(job.pending()) == killed_after


def test_parts_that_nobody_knows_are_not_taken(tmp_path, capsys):
    source = pairs(tmp_path / "in.parquet", some(4))
    job = job_of(tmp_path, source, 2)
    parts_by(job, 0)
    for damage in (lambda path: path.write_text("{"), lambda path: path.unlink()):
        damage(job.parts / "job.json")
        assert score_file(tmp_path, source, "--chunk-rows=2") == (2, None)
        assert "has parts, and no job.json that says of which job: --restart" in capsys.readouterr().err
    code, rows = score_file(tmp_path, source, "--chunk-rows=2", "--restart")
    assert (code, [r["score"] for r in rows]) == (0, [0.0, 1.0, 2.0, 3.0])


def test_an_input_of_equal_size_is_another_job(tmp_path, capsys):
    path = tmp_path / "in.parquet"
    source = pairs(path, [("q", "logits 1 0"), ("q", "logits 2 0")])
    parts_by(job_of(tmp_path, source, 1, "fake abc123"), 0)
    size = path.stat().st_size
    pairs(path, [("q", "logits 3 0"), ("q", "logits 4 0")])
    assert path.stat().st_size == size
    assert score_file(tmp_path, source, "--chunk-rows=1") == (2, None)
    assert "(input changed)" in capsys.readouterr().err


def test_an_input_that_changes_on_the_way_ends_the_job(tmp_path, capsys):
    path = tmp_path / "in.parquet"
    source = pairs(path, some(14))

    class Meddling(FakeRuntime):
        def __init__(self):
            super().__init__()
            submit = self.batcher.submit

            async def submitting(request, deadline=None):
                os.utime(path, ns=(1, 1))
                return await submit(request, deadline)

            self.batcher.submit = submitting

    assert score_file(tmp_path, source, "--chunk-rows=7", runtime=Meddling()) == (2, None)
    assert "was changed while its rows were scored" in capsys.readouterr().err


def test_another_model_on_the_way_ends_the_job_before_its_scores_are_kept(tmp_path, capsys):
    source = pairs(tmp_path / "in.parquet", some(8))

    class Reloaded(FakeRuntime):
        def fingerprint(self):
            return f"of {self.batcher.submitted > 4}"

    assert score_file(tmp_path, source, "--chunk-rows=4", runtime=Reloaded()) == (2, None)
    assert "another model or other settings are served now" in capsys.readouterr().err
    assert [f for f in sorted(os.listdir(tmp_path / "out.parquet.parts")) if f[0] == "0"] == ["00000000.parquet"]


def test_a_server_that_tells_no_fingerprint_is_refused(tmp_path, capsys):
    class Old(FakeRuntime):
        def fingerprint(self):
            return ""

    source = pairs(tmp_path / "in.parquet", some(2))
    assert score_file(tmp_path, source, runtime=Old()) == (2, None)
    assert "tells no fingerprint" in capsys.readouterr().err


def test_two_runs_of_one_output_do_not_meet(tmp_path, capsys):
    source = pairs(tmp_path / "in.parquet", some(4))
    job = job_of(tmp_path, source, 2, "fake abc123")
    with begun(job):
        for restart in ([], ["--restart"]):
            assert score_file(tmp_path, source, "--chunk-rows=2", *restart) == (2, None)
            assert "another run is at work on" in capsys.readouterr().err
        assert (job.parts / "job.json").exists()
    assert score_file(tmp_path, source, "--chunk-rows=2")[0] == 0


def test_an_output_that_is_there_is_replaced_only_where_that_is_said(tmp_path, capsys):
    source = pairs(tmp_path / "in.parquet", some(4))
    (tmp_path / "out.parquet").write_text("of somebody else")
    assert exit_code(tmp_path / "out.parquet", source) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
    assert (tmp_path / "out.parquet").read_text() == "of somebody else"
    late = job_of(tmp_path, source, 2)
    with pytest.raises(ConfigError, match="--overwrite replaces it"), begun(late):
        pytest.fail("it was written after this run had looked for it")
    assert not late.parts.exists()
    assert len(score_file(tmp_path, source, "--overwrite")[1]) == 4


@pytest.mark.parametrize("output", ["folder", "file/out"])
def test_an_output_that_cannot_be_written_is_told_before_anything_is_scored(tmp_path, capsys, output):
    source = pairs(tmp_path / "in.parquet", some(2))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    runtime = FakeRuntime()
    assert exit_code(tmp_path / output, source, runtime=runtime) == 2
    assert f"the output {tmp_path / output}" in capsys.readouterr().err
    assert runtime.batcher.submitted == 0


@pytest.mark.parametrize("harm", ["damage", "remove"])
def test_trouble_with_the_input_on_the_way_is_told_of_the_input_and_what_is_done_is_kept(tmp_path, capsys, harm):
    source = pairs(tmp_path / "in.parquet", [(f"q{n}", f"logits {n} 0") for n in range(21)])
    whole = (tmp_path / "in.parquet").read_bytes()
    if harm == "damage":  # in the third of its groups of rows
        page = pq.read_metadata(source).row_group(2).column(0).data_page_offset
        (tmp_path / "in.parquet").write_bytes(whole[:page] + b"\xff" * 40 + whole[page + 40 :])
    runtime = FakeRuntime()
    score = runtime.batcher.submit

    async def scored(*given):
        if harm == "remove":
            (tmp_path / "in.parquet").unlink(missing_ok=True)
        return await score(*given)

    runtime.batcher.submit = scored
    assert score_file(tmp_path, source, "--chunk-rows=7", runtime=runtime) == (2, None)
    told = capsys.readouterr().err
    assert source in told
    assert "the output" not in told
    assert (tmp_path / "out.parquet.parts" / "00000000.parquet").exists()


def test_a_part_that_cannot_be_written_is_told_of_the_output(tmp_path, capsys):
    source = pairs(tmp_path / "in.parquet", some(4))
    (tmp_path / "out.parquet.parts" / "00000001.parquet" / "no part").mkdir(parents=True)
    job = job_of(tmp_path, source, 2)
    with pytest.raises(ConfigError, match=f"the output {job.output}: .*directory"):
        write_part(job, 1, pa.table({"query": ["q"]}), [ScoredRow("OK")])


def test_scores_are_the_services_own(tmp_path):
    model = [f"--model={tiny_model_dir(tmp_path / 'model')}", "--profile=instruct", "--threads=1"]
    rows = [(f"query {n // 6}", f"document {n} " + "word " * (n % 5)) for n in range(24)]
    source = pairs(tmp_path / "in.parquet", rows)
    assert main(["score-file", source, "-o", str(tmp_path / "out.parquet"), "--chunk-rows=10", *model]) == 0
    out = pq.read_table(tmp_path / "out.parquet").to_pylist()
    server = Server(model)
    try:
        with ScorerClient(server.wait_until_listening(), channel_options=LOOPBACK_OPTIONS) as client:
            for n, row in enumerate(out):
                (result,) = client.score(rows[n][0], [rows[n][1]]).results
                assert row["score"] == pytest.approx(result.score, abs=1e-4)
                assert row["probability"] == pytest.approx(result.probability, abs=1e-4)
    finally:
        server.stop()


def test_rows_left():
    assert command.rows_left(10, 25, [0, 2]) == 15
    assert command.rows_left(10, 25, []) == 0


def test_a_worker_scores_only_as_the_job_began(tmp_path):
    """Ray's worker without Ray."""
    source = pairs(tmp_path / "in.parquet", some(6))
    job, other = (job_of(tmp_path, source, 2, f"fake {revision}") for revision in ("abc123", "other"))
    remote = ("timeout", 5.0), ("server_ca", None), ("client_certificate", None), ("client_key", None)
    given = {**dict(remote), "token_file": None, "concurrency": 2, "max_tokens_per_document": 0}

    def works(target):
        args = Namespace(target=target, **given)
        with pytest.raises(ConfigError, match="this worker serves another model"):
            ChunkScorer(args, other)
        return ChunkScorer(args, job)({"chunk": [0, 2]})

    async def scenario():
        async with Life(FakeRuntime()) as life:
            return await asyncio.to_thread(works, await life.listening())

    with begun(job):
        assert asyncio.run(scenario())["rows"] == [2, 2]
        assert job.pending() == [1]
