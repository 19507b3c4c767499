"""Source files as rows for a trainer.

``python -m mlx_lm_mtp.recipe.rows FOLDER PATTERN OUT``

Writes OUT/train.jsonl and OUT/valid.jsonl, split by the files' names.
"""

import sys
from pathlib import Path

from .corpus import Source, write_rows


def main(folder: Path, pattern: str, out: Path) -> None:
    """Write both files."""
    sources = [
        Source(path.relative_to(folder).as_posix(), path.read_text("utf-8"))
        for path in sorted(folder.rglob(pattern))
    ]
    write_rows(out / "train.jsonl", [s for s in sources if not s.held_out])
    write_rows(out / "valid.jsonl", [s for s in sources if s.held_out])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
