"""Which of the models that people train are exact under context parallelism, unmodified, and what do they send?

    python benchmarks/model_zoo.py [--only NAME,...] [--cp 2,4] [--lengths 32,29] [--batches NAME,...] [--jobs 2]
                                   [--write docs/models.md]

Every model of ``benchmarks/zoo/models.py`` (random weights, float64, two layers) on simulated ranks, each batch and
length: outputs and every parameter's gradient beside the plain model. The table goes to the terminal, or with
``--write`` to a file. Exit code 1 where a model is wrong, or refused and should not be, or the reverse.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from zoo.batches import BATCHES, EXTRAS, fits
from zoo.judge import LIMIT, Verdict, judge
from zoo.models import KINDS, MODELS, build

Case = tuple[str, str, int, int, str]
"""Model, batch, length, ranks, extra."""


def cases(names: list[str], batches: list[str], lengths: list[int], cp_sizes: list[int]) -> list[Case]:
    """Every call that is tried; the arguments that trainers add, on the first model and one of experts."""
    found: list[Case] = []
    for name in names:
        model = build(MODELS[name])
        taken = [batch for batch in batches if fits(model, batch) and batch not in MODELS[name].without]
        found += [(name, batch, n, cp, "") for batch in taken for n in lengths for cp in cp_sizes]
        if MODELS[name].extras:
            found += [(name, batches[0], lengths[-1], cp, extra) for extra in EXTRAS for cp in cp_sizes]
    return found


def run(case: Case) -> Verdict:
    """One call, in a process of its own threads."""
    torch.set_num_threads(1)
    name, batch, length, cp_size, extra = case
    return judge(MODELS[name], batch, length, cp_size, extra)


def table(verdicts: list[Verdict]) -> list[list[str]]:
    """One row a model and number of ranks."""
    of: dict[tuple[str, int], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        of[verdict.entry.name, verdict.cp_size].append(verdict)
    order = {name: place for place, name in enumerate(MODELS)}
    return [_row(of[key]) for key in sorted(of, key=lambda key: (order[key[0]], key[1]))]


def _row(verdicts: list[Verdict]) -> list[str]:
    entry, cp_size = verdicts[0].entry, str(verdicts[0].cp_size)
    refused = [verdict for verdict in verdicts if verdict.refused]
    if refused:
        what, *_, remedy = refused[0].refused.splitlines()
        return [entry.name, cp_size, "refused", "", "", "", f"{what}; {remedy.strip()}"]
    failed = [verdict for verdict in verdicts if verdict.failed]
    if failed:
        return [entry.name, cp_size, "FAILED", "", "", "", failed[0].failed.splitlines()[0]]
    worst = max(verdicts, key=lambda verdict: verdict.error)
    plain = [verdict for verdict in verdicts if verdict.batch in BATCHES]
    moves = {name: max(v.moves.get(name, 0) for v in plain) for v in plain for name in v.moves}
    per_layer = ", ".join(f"{count / entry.layers:g} {_SHORT[name]}" for name, count in sorted(moves.items()))
    ratios = [verdict.sent / verdict.least for verdict in plain if verdict.least]
    ratio = f"{max(ratios):.2f}" if ratios else "-"
    verdict = "exact" if worst.error <= LIMIT else f"WRONG ({worst.worst})"
    return [entry.name, cp_size, verdict, per_layer or "none", ratio, f"{worst.error:.0e}", f"{len(verdicts)} calls"]


_SHORT = {"all_to_all_single": "all-to-all", "all_gather_into_tensor": "all-gather", "reduce_scatter_tensor": "scatter"}
_COLUMNS = (
    "model", "cp", "", "collectives a layer, forward", "bytes over the least", "largest error", "tried, or why refused",
)  # fmt: skip


def page(rows: list[list[str]], lengths: list[int], batches: list[str]) -> str:
    """The table as Markdown, by kind."""
    import transformers

    lines = [
        "# Models",
        "",
        "Written by `python benchmarks/model_zoo.py --write docs/models.md`: models of transformers "
        f"{transformers.__version__} under torch {torch.__version__.split('+')[0]}, unmodified, with random weights in "
        "float64, two small layers (4 heads, 2 kv heads where the model has grouped ones).",
        "",
        f"*exact*: with {', '.join(batches)} batches of {' and '.join(map(str, lengths))} tokens, every output and the "
        f"gradient of every parameter is that of the plain model, to {LIMIT:g} of its norm (norms, softmax and losses "
        "of these models run in float32). The plain experts run one by one. *Bytes over the least*: all that a rank "
        "hands to collectives but scalars, forward and backward, over what q, k, v and the output need, k and v with "
        "their own heads; `-`: other layers than attention send too; below 1: a "
        "single kv head is gathered, and queries stay.",
        "",
    ]
    for kind in KINDS:
        lines += [f"## {kind.capitalize()}", "", f"| {' | '.join(_COLUMNS)} |", f"|{' --- |' * len(_COLUMNS)}"]
        lines += [f"| {' | '.join(row)} |" for row in rows if MODELS[row[0]].kind == kind]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(number) for number in text.split(",")]
    words = lambda text: [word.strip() for word in text.split(";" if ";" in text else ",")]
    parser.add_argument("--only", type=words, default=list(MODELS), help="parts of names, divided by ; or ,")
    parser.add_argument("--batches", type=words, default=list(BATCHES))
    parser.add_argument("--lengths", type=numbers, default=[32, 29])
    parser.add_argument("--cp", type=numbers, default=[2, 4])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    names = [name for name in MODELS if any(part in name for part in options.only)]
    work = cases(names, options.batches, options.lengths, options.cp)
    verdicts = []
    with ProcessPoolExecutor(options.jobs) as pool:
        running = [pool.submit(run, case) for case in work]
        console = Console(stderr=True)
        for done in track(as_completed(running), "models", total=len(work), console=console):
            verdicts.append(done.result())
    rows = table(verdicts)
    if options.write:
        options.write.parent.mkdir(exist_ok=True)
        options.write.write_text(page(rows, options.lengths, options.batches))
    shown = Table(*_COLUMNS[:-1])
    for row in rows:
        shown.add_row(*row[:-1])
    Console().print(shown)
    bad = [verdict for verdict in verdicts if not verdict.ok]
    for verdict in bad:
        where = f"{verdict.entry.name}, {verdict.batch}, {verdict.length} tokens, cp {verdict.cp_size}"
        what = verdict.refused or verdict.failed or f"{verdict.error:.1e} in {verdict.worst}"
        print(f"NOT AS IT SHOULD BE: {where}: {what}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
