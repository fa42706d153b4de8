"""docs/llama-13b-on-8x910.md and its pictures: python docs/make_llama_13b.py [--workers N], or `make article`

Rehearses some forty steps and chooses seven plans, for which two cores take several minutes. Gives the same text every
time. Answers are kept in build/llama-13b, so a run that was stopped goes on. Needs peft for the rows with LoRA.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from llama_13b.beliefs import embedding_gradients, half_numbers
from llama_13b.beyond import GB, beliefs, gpt, seven
from llama_13b.block import BlockStory, block_story
from llama_13b.cases import BATCHES, BIG, BIG_PLANS, SMALL, TECHNIQUES, all_jobs
from llama_13b.draw import Line, block_picture, memory_picture
from llama_13b.page import (
    Answers,
    best_plans,
    five_cases,
    how_to_read,
    intro,
    short_answer,
    small_card,
    states,
)
from llama_13b.store import answer_all, to_stderr
from llama_13b.tables import GIB

DOCS = Path(__file__).resolve().parent
PAGE, IMAGES = DOCS / "llama-13b-on-8x910.md", DOCS / "images"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="processes that rehearse at the same time")
    begin = time.perf_counter()
    answers = Answers(answer_all(all_jobs(), parser.parse_args().workers, to_stderr))
    write(answers, block_story(BIG.workload, BIG.hardware, BATCHES[0] // BIG.devices))
    print(f"wrote {PAGE.name} and 2 pictures in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    return 0


def write(answers: Answers, story: BlockStory) -> None:
    PAGE.write_text(page(answers, story), encoding="utf-8")
    (IMAGES / "llama-13b-memory.svg").write_text(memory_svg(answers), encoding="utf-8")
    (IMAGES / "llama-13b-block.svg").write_text(block_svg(story), encoding="utf-8")


def page(answers: Answers, story: BlockStory) -> str:
    sections = [
        intro(answers),
        short_answer(answers),
        how_to_read(answers),
        states(answers),
        five_cases(answers),
        best_plans(answers),
        small_card(answers),
        beliefs(answers, story, embedding_gradients(), half_numbers()),
        gpt(answers),
        seven(answers),
    ]
    return "\n\n".join(sections) + "\n"


def memory_svg(answers: Answers) -> str:
    batch = BATCHES[0]
    rows = [(name, answers.technique(batch, name)) for name in TECHNIQUES]
    rows.append(("the plan", answers.plan(BIG_PLANS[batch]).predicted))
    big, small = answers.allowed / GIB, answers.allowed_small / GIB
    limits = [Line(small, f"{small:.1f} GiB: allowed on 32 GB"), Line(big, f"{big:.1f} GiB: allowed on 64 GB")]
    title = f"LLaMA-13B on {BIG.devices} cards, ZeRO 3, {batch} sequences of {BIG.seq_len}: one card at the peak"
    return memory_picture(title, rows, limits, widest=3.5 * big)


def block_svg(story: BlockStory) -> str:
    rows = [("one hidden tensor", story.hidden_bytes / GB)]
    rows += [(tier, saved / GB) for tier, saved in reversed(story.saved.items())]
    sequences = BATCHES[0] // BIG.devices
    title = f"What one of LLaMA-13B's blocks saves for backward, {sequences} sequences of {BIG.seq_len}"
    words = f"{SMALL.seq_len} tokens a sequence, half precision, hidden states in fp32 between blocks"
    return block_picture(title, rows, words)


if __name__ == "__main__":
    sys.exit(main())
