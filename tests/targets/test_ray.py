"""`make test-ray`: score-file --ray on a local Ray with two workers, each an engine with a tiny model."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scorer.__main__ import main
from scorer.bulk.parts import Job, begun
from scorer.bulk.source import describe
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.target
ray_data = pytest.importorskip("ray.data", reason="make test-ray installs it")


def test_two_workers_give_the_scores_of_one_process(tmp_path, capsys):
    rows = [(f"query {n // 6}", f"document {n} " + "word " * (n % 5)) for n in range(60)]
    source = str(tmp_path / "in.parquet")
    pq.write_table(pa.table({"query": [q for q, _ in rows], "document": [d for _, d in rows]}), source)
    model = [f"--model={tiny_model_dir(tmp_path / 'model')}", "--profile=instruct", "--threads=1", "--chunk-rows=10"]

    # Ten rows take a tiny model no time: the first worker that is up would do them all.
    ray_data.DataContext.get_current().wait_for_min_actors_s = 120

    alone, spread = str(tmp_path / "alone.parquet"), str(tmp_path / "spread.parquet")
    assert main(["score-file", source, "-o", alone, *model]) == 0
    assert main(["score-file", source, "-o", spread, *model, "--ray", "--workers=2"]) == 0
    expected = pq.read_table(alone).to_pylist()
    found = pq.read_table(spread).to_pylist()
    assert [r["document"] for r in found] == [d for _, d in rows]
    assert [r["score"] for r in found] == pytest.approx([r["score"] for r in expected], abs=1e-4)
    assert not os.path.exists(f"{spread}.parts")
    told = capsys.readouterr()
    assert told.out.count("60 OK") == 2
    assert "2 workers scored 6 chunks" in told.err


def test_parts_of_another_checkpoint_are_refused_and_so_is_what_no_worker_can_score(tmp_path, capsys):
    source, output = str(tmp_path / "in.parquet"), str(tmp_path / "out.parquet")
    pq.write_table(pa.table({"query": ["q"], "document": ["d"]}), source)
    model = [f"--model={tiny_model_dir(tmp_path / 'model')}", "--profile=instruct", "--threads=1", "--ray"]
    assert main(["score-file", source, "-o", output, *model, "--max-tokens-per-document=100000"]) == 2
    assert "--max-tokens-per-document: at most" in capsys.readouterr().err
    with begun(Job(describe(source, "query", "document"), output, 20_000, "another", 0)):
        pass
    assert main(["score-file", source, "-o", output, *model]) == 2
    assert "(scorer changed)" in capsys.readouterr().err
