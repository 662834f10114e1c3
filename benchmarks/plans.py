"""Ten varied jobs, each planned and then run: `python benchmarks/plans.py [--clock cpu] [JOB ...]`.

For each job the planned time and memory stand beside what the job took. A job that is already
in the results is not repeated unless it is named. Plan and job run in processes of their own, forked from one that has
everything imported, so that the program's start is left out of both.

`--clock cpu` counts the seconds of the processor in place of those on the wall, for a machine that others use too; the
seconds on the wall are kept beside them. Both need one thread: OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
RESULTS = Path(__file__).parent / "results" / "plans.json"
CLOZE = {"interface": "cloze", "new": "new.jsonl", "anchors": "keep.jsonl", "past": "past.jsonl"}
FREE = {"new": "talk.jsonl", "anchors": "known.jsonl", "plain": True, "max_new_tokens": 24}
CHAT = {"model": "smollm2-135m", "new": "chat.jsonl", "past": "chat-past.jsonl", "max_new_tokens": 16, "lr": 1e-4}
JOBS: dict[str, dict[str, Any]] = {
    "cplus, 64 probes": {**CLOZE, "num_probes": 64, "epochs": 4},
    "sft, batches of 2": {**CLOZE, "method": "sft", "anchors": None, "batch_size": 2, "epochs": 3},
    "cpl with LoRA": {**CLOZE, "method": "cpl", "lora": {"r": 8}, "epochs": 4},
    "replay, compared with sft": {**CLOZE, "method": "replay", "epochs": 4, "compare": ["sft"]},
    "cplus with repair": {**CLOZE, "num_probes": 16, "epochs": 3, "repair": True},
    "cpl until learned": {**CLOZE, "method": "cpl", "epochs": 8, "stop": "learned"},
    "cplus on the small toy, SGD": {**CLOZE, "model": "toy-s", "num_probes": 128, "epochs": 3, "optimizer": "sgd"},
    "cpl on free text, long rows": {**FREE, "method": "cpl", "new": "long.jsonl", "epochs": 4, "batch_size": 4},
    "ewc on the large toy": {**CLOZE, "model": "toy-l", "method": "ewc", "epochs": 3},
    "SmolLM2 chat, LoRA": {**CHAT, "method": "sft", "lora": {"r": 8}, "epochs": 1, "batch_size": 4},
}


def write_rows(folder: Path) -> None:
    """The files that the jobs read."""
    from cplus.data.examples import lines
    from cplus.toy import world

    new, known = world.untaught("harbours"), world.taught("harbours")
    cuts = {"new": new[:64], "keep": known[:16], "past": known[16:112]}
    for name, rows in cuts.items():
        (folder / f"{name}.jsonl").write_text(lines(rows), encoding="utf-8")

    def free(name: str, rows: list[tuple[str, str]]) -> None:
        text = "".join(json.dumps({"prompt": prompt, "response": response}) + "\n" for prompt, response in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")

    pairs = [(fact.question, fact.right) for fact in new[:32]]
    free("known", [(fact.question, fact.right) for fact in known[:24]])
    free(
        "long",
        [(" ".join(q for q, _ in pairs[i : i + 4]), ". ".join(a for _, a in pairs[i : i + 4])) for i in range(24)],
    )
    chats = [
        (f"Where is {fact.question.split()[-1]}", f"Please ask the harbour office: {fact.right}.") for fact in new[:20]
    ]
    free("chat", chats[:12])
    free("chat-past", [(f"What is {a} plus {a + 3}?", f"{a} plus {a + 3} is {2 * a + 3}.") for a in range(2, 10)])


def child(work: Callable[[], Any]) -> Any:
    """The value of a function called in a process of its own."""
    with tempfile.NamedTemporaryFile() as file:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                Path(file.name).write_bytes(pickle.dumps(work()))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise SystemExit("a job failed; see above")
        return pickle.loads(Path(file.name).read_bytes())


def tried(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One job: planned, done, and both beside each other."""
    import torch

    from cplus.jobs.adapt import adapt
    from cplus.jobs.plan import plan
    from cplus.jobs.settings import settings

    base = {"model": "toy", "lr": 1e-3, "batch_size": 8, "stop": "never", "device": "cpu", "evaluate_rows": 16}
    config = settings({**base, **given, "out": folder / "out"})

    def planned() -> tuple[Any, float]:
        torch.set_num_threads(1)
        begun = time.perf_counter()
        return plan(config), time.perf_counter() - begun

    def done() -> tuple[dict[str, Any], float, float]:
        torch.set_num_threads(1)
        begun, wall = time.perf_counter(), time.monotonic()
        record = adapt(config, force=True).record
        return dict(record["actual"]), time.perf_counter() - begun, time.monotonic() - wall

    expected, planning = child(planned)
    actual, seconds, wall = child(done)
    return {
        "planned": sum(expected.seconds.values()),
        "seconds": seconds,
        "wall": wall,
        "planning": planning,
        "parts": {part: [spent, actual["seconds"].get(part, 0.0)] for part, spent in expected.seconds.items()},
        "planned_bytes": expected.peak,
        "computed_bytes": expected.found.need.peak,
        "bytes": actual["peak_bytes"],
    }


def main() -> None:
    """Plan and run the jobs that are not in the results yet, and print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("jobs", nargs="*", help="names of jobs to run again; by default those without a result")
    options.add_argument("--clock", choices=CLOCKS, default="wall")
    options.add_argument("--out", type=Path, default=RESULTS)
    asked = options.parse_args()
    if unknown := set(asked.jobs) - set(JOBS):
        raise SystemExit(f"expected jobs of {', '.join(JOBS)}; got {', '.join(unknown)}")
    time.perf_counter = CLOCKS[asked.clock]  # before anything of cplus reads a clock
    out = asked.out.resolve()
    results = json.loads(out.read_text()) if out.exists() else {"clock": asked.clock, "jobs": {}}
    if results["clock"] != asked.clock:
        raise SystemExit(f"{out} holds times by the {results['clock']} clock; give another --out")
    with tempfile.TemporaryDirectory(prefix="cplus-plans-") as place:
        folder = Path(place)
        os.chdir(folder)
        import cplus.jobs.adapt
        import cplus.jobs.plan  # noqa: F401

        write_rows(folder)
        for name in asked.jobs or [name for name in JOBS if name not in results["jobs"]]:
            given = dict(JOBS[name])
            os.environ["CPLUS_CACHE"] = str(folder / "cache") if given.get("model") != CHAT["model"] else ""
            if "compare" in given and not Path("sft").exists():
                from cplus.jobs.adapt import adapt
                from cplus.jobs.settings import settings

                sft = {**CLOZE, "model": "toy", "method": "sft", "anchors": None, "epochs": 4, "out": folder / "sft"}
                child(lambda sft=sft: adapt(settings({**sft, "lr": 1e-3, "device": "cpu"})).folder)
            results["jobs"][name] = found = tried(given, folder)
            print(f"{name}: {found['planned']:.1f} {found['seconds']:.1f}", file=sys.stderr, flush=True)
            out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            shutil.rmtree(folder / "out")
            shutil.rmtree(folder / "cache", ignore_errors=True)
    print(table(results))


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["| job | planned | took | memory planned | measured |", "|---|---|---|---|---|"]
    for name, found in results["jobs"].items():
        measured = "" if found["bytes"] is None else f"{found['bytes'] / 1e6:.0f} MB"
        lines.append(
            f"| {name} | {found['planned']:.1f} s | {found['seconds']:.1f} s | "
            f"{found['planned_bytes'] / 1e6:.0f} MB | {measured} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
