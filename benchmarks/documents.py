"""Writes what the results say into README.md and docs/, between their markers.

python benchmarks/documents.py
"""

import argparse
from pathlib import Path

import ablation
import accuracy
import chapter9
import counters
import grid_order
import host_cost
import launch_bounds
import matrix_cost
import report
import roofline
import sizes
import suite
import tune

#: What writes one table, from the one file of its name.
SCRIPTS = {
    script.__name__: script
    for script in (
        ablation,
        accuracy,
        chapter9,
        grid_order,
        host_cost,
        launch_bounds,
        matrix_cost,
        sizes,
        tune,
    )
}


def documents() -> dict[Path, str]:
    """The documents as the results would have them."""
    readme, story = report.ROOT / "README.md", report.ROOT / "docs" / "ladder.md"
    paths = readme, *sorted((report.ROOT / "docs").glob("*.md"))
    texts = {path: path.read_text() for path in paths}

    def put(path: Path, marker: str, content: str) -> None:
        if f"<!-- {marker} -->" in texts[path]:  # the documents show some devices, not all
            texts[path] = report.between_markers(texts[path], marker, content)

    for folder in sorted(path.parent for path in report.RESULTS.glob("*/env.json")):
        found = {path.stem: report.read_csv(path) for path in folder.glob("*.csv")}
        envs = {name: report.read_environment(folder, f"{name}.csv") for name in found}
        name = folder.name
        if "ladder" in found:
            put(readme, f"ladder {name}", report.ladder_markdown(found["ladder"], envs["ladder"]))
            put(story, f"claims {name}", report.claims_markdown(found["ladder"], envs["ladder"]))
        if {"ladder", "profile", "roofline"} <= set(found):
            size = found["ladder"][0]["M"]
            table = counters.markdown(found["profile"], size, envs["profile"])
            put(story, f"counters {name}", table)
            table = roofline.markdown(found["roofline"], found["profile"], envs["profile"])
            put(story, f"intensities {name}", table)
        for what in found:
            script = suite if what.startswith("suite_") else SCRIPTS.get(what)
            if script:
                for path in texts:
                    put(path, f"{what} {name}", script.markdown(found[what], envs[what]))
    return texts


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    for path, text in documents().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
