"""score-file over a fake server, over a tiny real model, stopped and gone on, and its files."""

import asyncio
import json
import os

import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batching.batcher import DeviceFailed
from prefixrank.v1 import scorer_pb2 as pb
from scorer.__main__ import main
from scorer.bulk import command
from scorer.bulk.parts import Job, begin, finish, tables, write_part
from scorer.bulk.rows import Options, ScoredRow, score_rows
from scorer.client import ScorerClient, ScorerError
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


def score_file(tmp_path, source, *arguments, runtime=None):
    """Exit code and output rows of a run over a fake server."""

    async def scenario():
        async with Life(runtime or FakeRuntime()) as life:
            asked = ["score-file", source, "-o", str(tmp_path / "out.parquet"), f"--target={await life.listening()}"]
            return await asyncio.to_thread(main, [*asked, *arguments])

    code = asyncio.run(scenario())
    out = tmp_path / "out.parquet"
    return code, pq.read_table(out).to_pylist() if out.exists() else None


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


@pytest.mark.parametrize("arguments", [["--workers=2"], ["--target=h:1", "--model=m"], ["--chunk-rows=0"]])
def test_wrong_usage(tmp_path, arguments):
    with pytest.raises(SystemExit) as caught:
        main(["score-file", "in", "-o", "out", *arguments])
    assert caught.value.code == 2


def test_the_input_is_never_replaced(tmp_path):
    source = pairs(tmp_path / "in.parquet", [("q", "d")])
    with pytest.raises(SystemExit):
        main(["score-file", source, "-o", source])
    assert pq.read_table(source).num_rows == 1


@pytest.mark.parametrize("chunk_rows", [1, 5, 7, 10, 100])
def test_chunks_are_even_whatever_the_row_groups(tmp_path, chunk_rows):
    source = pairs(tmp_path / "in.parquet", some(33))
    job = Job(source, str(tmp_path / "out"), "query", "document", chunk_rows, 33, 1, "s", 0)
    found = list(tables(job, range(job.chunks)))
    assert [number for number, _ in found] == list(range(job.chunks))
    assert [t.num_rows for _, t in found[:-1]] == [chunk_rows] * (job.chunks - 1)
    assert [n for _, t in found for n in t["id"].to_pylist()] == list(range(33))
    (only,) = list(tables(job, [job.chunks - 1]))
    assert only[1].equals(found[-1][1])
    begin(job, restart=False)
    for number, table in found:
        write_part(job, number, table, [ScoredRow("OK", "", 0.5)] * table.num_rows)
    assert finish(job) == {"OK": 33}
    assert not job.parts.exists()


def test_a_half_written_part_is_no_part(tmp_path):
    source = pairs(tmp_path / "in.parquet", some(4))
    job = Job(source, str(tmp_path / "out"), "query", "document", 2, 4, 1, "s", 0)
    begin(job, restart=False)
    (job.parts / ".00000000.parquet.123").write_bytes(b"half")
    assert job.pending() == [0, 1]
    with pytest.raises(ConfigError, match="rows changed"):
        begin(Job(source, str(tmp_path / "out"), "query", "document", 2, 5, 1, "s", 0), restart=False)
    assert json.loads((job.parts / "job.json").read_text())["rows"] == 4


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
