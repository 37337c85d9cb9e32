"""Rates of right answers of a model, family by family, through the real runtime (no torch).

`PYTHONPATH=models:onnx:build:runtime python -m tools.demo_model.listen models/demo --seeds 3`
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from tests.listening.measures import as_float
from tests.listening.prompts import families

from sa3_runtime.session import load


def main() -> None:
    """Parse, render, judge, print."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--first", type=int, default=1, help="first seed")
    p.add_argument("--steps", type=int)
    p.add_argument("--sampler")
    p.add_argument("--cfg", type=float)
    p.add_argument("--rescale", type=float)
    p.add_argument("--apg", type=float)
    p.add_argument("--seconds", type=float, help="instead of each family's own length")
    p.add_argument("--only", help="families whose name holds this")
    p.add_argument("--misses", action="store_true")
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    options = {k: getattr(a, k) for k in ("steps", "sampler", "cfg", "rescale", "apg")}
    rows, begin = {}, time.monotonic()
    with load(a.model) as session:
        for name, cases in families().items():
            if a.only and a.only not in name:
                continue
            verdicts = []
            for case in cases:
                for seed in range(a.first, a.first + a.seeds):
                    clip = session.generate(
                        case.prompt, seconds=a.seconds or case.seconds, seed=seed, **options
                    )
                    right, value = case.judge(as_float(clip.pcm))
                    verdicts.append(right)
                    if a.misses and not right:
                        print(f"  {case.prompt!r} seed {seed}: {value:.3f}")
            rows[name] = [sum(verdicts), len(verdicts)]
            print(f"{name:22} {sum(verdicts):4}/{len(verdicts):<4} "
                  f"{100 * sum(verdicts) / len(verdicts):5.1f} %", flush=True)  # fmt: skip
    print(f"{time.monotonic() - begin:.0f} s")
    if a.json:
        a.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
