"""README's code runs. A fence that says ```bash run, ```python run or ```json run is run, in the order of the file.

bash    in a directory of its own that the blocks share, with `prefixrank` on the path; it must exit with 0
python  likewise
json    a line for `prefixrank score --input`

Where a block says localhost:50051, it meets one server with the embedded model, whatever its port is here. Fences
without `run` are for reading.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from scorer.demo import Server
from scorer.profile import load_profile

README = Path(__file__).parent.parent / "README.md"
ADDRESS = "localhost:50051"
SECONDS = 240
FENCE = re.compile(r"^```(\S+) +run *\n(.*?)^``` *$", re.MULTILINE | re.DOTALL)
RUN = {
    "bash": lambda code, target: (["bash", "-euo", "pipefail", "-c", code], None),
    "python": lambda code, target: ([sys.executable, "-c", code], None),
    "json": lambda code, target: (["prefixrank", "score", "--json", "--target", target], code),
}


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int


def blocks(text):
    """The runnable blocks of a Markdown file."""
    return [Block(m[1], m[2], text.count("\n", 0, m.start()) + 1) for m in FENCE.finditer(text)]


def unknown_fences(text):
    """What opens a fence and is neither one word nor a runnable block: a misspelt mark would hide a block for good."""
    infos = [line.removeprefix("```").split() for line in text.splitlines() if line.startswith("```")]
    return [info for info in infos if len(info) > 1 and (len(info) > 2 or info[1] != "run" or info[0] not in RUN)]


def lacking(text):
    """Languages of which a README that says how to use the service shows no runnable block."""
    return {"bash", "python"} - {block.language for block in blocks(text)} if "\n## Use it" in text else set()


def run(block, directory, target):
    command, given = RUN[block.language](block.code.replace(ADDRESS, target), target)
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "no_grpc_proxy": "localhost,127.0.0.1"}
    return subprocess.run(
        command,
        input=given or "",
        cwd=directory,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


SAMPLE = f"""# Sample

```bash
exit 1
```

## Use it

```bash run
echo "to {ADDRESS}" > made-by-bash
```
```python run
print(open("made-by-bash").read())
```
```text
bash run
```
"""


def test_only_marked_blocks_are_found_and_they_share_a_directory(tmp_path):
    shell, python = blocks(SAMPLE)
    assert (shell.language, python.language) == ("bash", "python")
    assert SAMPLE.splitlines()[shell.line - 1] == "```bash run"
    assert run(shell, tmp_path, "10.0.0.1:7").returncode == 0
    assert run(python, tmp_path, "10.0.0.1:7").stdout == "to 10.0.0.1:7\n\n"
    assert run(Block("bash", "false\necho went on", 1), tmp_path, "").returncode == 1
    assert run(Block("python", "import nothing_of_the_kind", 1), tmp_path, "").returncode == 1


def test_a_readme_without_code_or_with_a_misspelt_mark_is_noticed():
    assert lacking(SAMPLE) == set()
    assert lacking(SAMPLE.replace("python run", "python")) == {"python"}
    assert lacking("# Nothing yet\n") == set()
    assert unknown_fences(SAMPLE) == []
    assert unknown_fences(SAMPLE.replace("python run", "python runs")) == [["python", "runs"]]


def test_the_readme_shows_code_that_runs():
    text = README.read_text(encoding="utf-8")
    assert lacking(text) == set()
    assert unknown_fences(text) == []


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("readme")


@pytest.fixture(scope="module")
def target():
    """One server with the embedded model. It is SERVING: so its start's proofs hold, golden scores too."""
    server = Server()
    try:
        yield server.wait_until_listening()
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize(
    "block", [pytest.param(b, id=f"line-{b.line}-{b.language}") for b in blocks(README.read_text(encoding="utf-8"))]
)
def test_a_block_of_the_readme_runs(block, directory, target):
    ran = run(block, directory, target)
    assert ran.returncode == 0, f"README.md line {block.line}:\n{block.code}\n{ran.stdout}\n{ran.stderr}"
    if block.language == "json":
        assert all(json.loads(line)["results"] for line in ran.stdout.splitlines())


def test_the_profile_that_it_shows_is_one(tmp_path):
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    path = tmp_path / "my.toml"
    path.write_text(shown)
    profile = load_profile(str(path))
    assert (profile.name, profile.labels, profile.limits.max_tokens_per_document) == (
        "my-reranker",
        ("Yes", "No"),
        4096,
    )
    assert profile.prefix.startswith("<|im_start|>user\n{instruction}\nQuery: {query}\nPassage:")
