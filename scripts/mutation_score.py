"""The score of a mutation run, from what `mutmut export-cicd-stats` wrote: killed mutants, in percent of those tried.
Exit code 1 where it is below the minimum.

    mutation_score.py mutants/mutmut-cicd-stats.json 85
"""

import json
import sys
from pathlib import Path


def main(file: str, minimum: str) -> int:
    """Prints the counts and the score."""
    counts = json.loads(Path(file).read_text(encoding="utf-8"))
    killed = counts["killed"] + counts["timeout"]  # a mutant that never ends is noticed
    tried = killed + counts["survived"] + counts["suspicious"] + counts["no_tests"] + counts["segfault"]
    if not tried:
        print("no mutant was tried")
        return 1
    score = 100 * killed / tried
    print(f"{killed} of {tried} mutants killed: {score:.1f} %; survivors: mutmut results, mutmut show NAME")
    return int(score < float(minimum))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
