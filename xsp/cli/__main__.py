"""Entry point of `python -m xsp.cli`, by which launchers start `xsp run` on each rank."""

import sys

from xsp.cli import main


def _with_rank_option(words: list[str]) -> list[str]:
    """Return words with the program's `--local_rank`, which some launchers put first, turned into an option of xsp."""
    if words and words[0].startswith(("--local_rank=", "--local-rank=")):
        return [words[1], f"--for-program={words[0]}", *words[2:]]
    return words


if __name__ == "__main__":
    sys.exit(main(_with_rank_option(sys.argv[1:])))
